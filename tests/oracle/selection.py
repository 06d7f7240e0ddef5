"""The two selections that CPython's side runs programs on: NumPy's handler by ctxalloc, and a bare ContextVar.

The bare one is PEP 567 and nothing else, so the Python layer is itself checked against the design.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
from language import HANDLERS

import ctxalloc

_core = "numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core"
get_handler_name: Callable[..., str | None] = importlib.import_module(f"{_core}.multiarray").get_handler_name
"""NumPy's own."""

STRANGE: Final = 9
"""What is recorded where the sources of truth disagree, or name a handler of nobody."""


class StrangeError(Exception):
    """ctxalloc says one thing and does another."""


class Scope(Protocol):
    """What `ctxalloc.use()` gives."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def __aenter__(self) -> Awaitable[object]: ...
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> Awaitable[None]: ...


class Selection(Protocol):
    """One way to select handlers, which are numbers here."""

    name: str

    def current(self) -> int:
        """The running context's handler."""

    def block(self) -> int:
        """The handler of a block of memory made now."""

    def set(self, handler: int) -> Any:
        """Selects; returns a token."""

    def old(self, token: Any) -> int:
        """What a token would put back."""

    def reset(self, token: Any) -> None:
        """RuntimeError for a used token, ValueError for one of another context."""

    def scope(self, handler: int) -> Scope:
        """For `with` and `async with`."""

    def decorated(self, handler: int, function: Callable[[], Any]) -> Callable[[], Any]:
        """A function or coroutine function whose body runs in a scope."""

    def stream(self, handler: int, producer: Callable[[], AsyncGenerator[None, None]]) -> AsyncIterator[None]:
        """An async generator whose body runs in a context of its own with that handler. It has `aclose()`."""


class InContext:
    """Awaits an awaitable in a context of its own without a task: steps it by hand, as Rust's `Scoped` polls."""

    def __init__(self, context: contextvars.Context, inner: Awaitable[Any]) -> None:
        self.context = context
        self.inner = inner

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self.inner.__await__()
        try:
            while True:
                try:
                    waits_for = self.context.run(steps.send, None)
                except StopIteration as stop:
                    return stop.value
                yield waits_for
        except GeneratorExit:
            self.context.run(steps.close)
            raise


class NumPy:
    """NumPy's own ContextVar, by ctxalloc's Python binding."""

    name = "numpy"

    def __init__(self) -> None:
        names = [f"oracle{number}" for number in range(1, HANDLERS)]
        known = {handler.name for handler in ctxalloc.handlers()}
        for name in names:
            if name not in known:
                ctxalloc.register(name, ctxalloc.strategies.System())
        self.handlers: list[ctxalloc.Handler | None] = [None, *map(ctxalloc.handler, names)]
        self.numbers = {name: number for number, name in enumerate(["default_allocator", *names])}

    def current(self) -> int:
        name = get_handler_name()
        if name != ctxalloc.current().name or name != ctxalloc.get_handler_name():
            return STRANGE
        return self.numbers.get(name, STRANGE)

    def block(self) -> int:
        array = np.empty(8)
        owner = ctxalloc.handler_of(array)
        name = get_handler_name(array)
        return self.numbers.get(name, STRANGE) if owner is not None and owner.name == name else STRANGE

    def set(self, handler: int) -> ctxalloc.Token:
        return ctxalloc.set_handler(self.handlers[handler])

    def old(self, token: ctxalloc.Token) -> int:
        return self.numbers.get(token.old_handler.name, STRANGE)

    def reset(self, token: ctxalloc.Token) -> None:
        used = token.used
        try:
            ctxalloc.reset(token)
        except RuntimeError as error:
            raise (error if used and token.used else StrangeError) from error
        except ValueError as error:
            raise (StrangeError if used or token.used else error) from error
        if used or not token.used:
            raise StrangeError

    def scope(self, handler: int) -> Scope:
        return ctxalloc.use(self.handlers[handler])

    def decorated(self, handler: int, function: Callable[[], Any]) -> Callable[[], Any]:
        return ctxalloc.use(self.handlers[handler])(function)

    def stream(self, handler: int, producer: Callable[[], AsyncGenerator[None, None]]) -> AsyncIterator[None]:
        return ctxalloc.use(self.handlers[handler])(producer)()


_variable: contextvars.ContextVar[int] = contextvars.ContextVar("oracle_handler", default=0)


class Bare:
    """A plain ContextVar."""

    name = "contextvars"

    def current(self) -> int:
        return _variable.get()

    def block(self) -> int:
        return _variable.get()

    def set(self, handler: int) -> contextvars.Token[int]:
        return _variable.set(handler)

    def old(self, token: contextvars.Token[int]) -> int:
        old = token.old_value
        return old if isinstance(old, int) else 0

    def reset(self, token: contextvars.Token[int]) -> None:
        _variable.reset(token)

    def scope(self, handler: int) -> Scope:
        return BareScope(handler)

    def decorated(self, handler: int, function: Callable[[], Any]) -> Callable[[], Any]:
        def in_scope() -> Any:
            with BareScope(handler):
                result = function()
                if not isinstance(result, Coroutine):
                    return result

            async def awaited() -> Any:
                with BareScope(handler):
                    return await result

            return awaited()

        return in_scope

    def stream(self, handler: int, producer: Callable[[], AsyncGenerator[None, None]]) -> AsyncIterator[None]:
        return BareStream(handler, producer())


class BareScope:
    """set and reset around a block."""

    def __init__(self, handler: int) -> None:
        self.handler = handler
        self.tokens: list[contextvars.Token[int]] = []

    def __enter__(self) -> Self:
        self.tokens.append(_variable.set(self.handler))
        return self

    def __exit__(self, *_: object) -> None:
        _variable.reset(self.tokens.pop())

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


class BareStream:
    """An async generator that is stepped in a context of its own."""

    def __init__(self, handler: int, steps: AsyncGenerator[None, None]) -> None:
        self.context = contextvars.copy_context()
        self.context.run(_variable.set, handler)
        self.steps = steps

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        await InContext(self.context, anext(self.steps))

    async def aclose(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            await InContext(self.context, self.steps.aclose())
