"""What the middlewares share: the terms that a request of a server gets, its beginning and its one end.

``Service`` has the options, ``Serving`` is one request that is being served. The Context carries the Serving beside the
selection, which stays NumPy's own ContextVar: it says who selected, not what. Neighbours: ``asgi``, ``wsgi`` and
``django`` drive it; ``problems`` makes answers; ``docs/decisions/0020-services-end-at-the-last-message.md`` has the
reasons.
"""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from contextvars import Token as ContextToken
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from ctxalloc._errors import BudgetExceeded, RequestEnded
from ctxalloc._native import Budget, Escaped, Handler, Request, Stats, Token, current, request, reset, set_handler, use

Scope: TypeAlias = MutableMapping[str, Any]
"""An ASGI scope or a WSGI environment."""

Terms: TypeAlias = Request | Handler | str | None
"""What a request of the server gets: a request of ours on these terms, a handler only, or nothing."""

Choice: TypeAlias = Terms | Callable[[Scope], Terms]
"""Terms, or who chooses them for a scope."""

Outcome: TypeAlias = Literal["completed", "refused", "failed", "cancelled", "disconnected", "unfinished"]

KEY: Final = "ctxalloc.serving"
"""Where a scope has its Serving."""

REQUEST_KEY: Final = "ctxalloc.request"
"""Where a scope has its Request."""

ACCOUNT: Final = request()
"""Terms without a limit: an account only."""

log = logging.getLogger("ctxalloc")


class Report(NamedTuple):
    """How a request of the server ended, for ``on_end``."""

    route: str | None
    """The pattern of ``routes`` that was its own, never the raw path; None where none was."""
    outcome: Outcome
    """``completed``: the whole answer was sent. ``refused``: a budget refused. ``failed``: an exception. ``cancelled``:
    its task was. ``disconnected``: the client went away first. ``unfinished``: the application returned without a whole
    answer."""
    status: int | None
    """The status of the answer; None where none was begun."""
    seconds: float
    """From the beginning to the end of the account."""
    stats: Stats
    """The numbers at the end."""
    escaped: Escaped
    """What was alive at the end."""
    error: BaseException | None
    """The exception that ended it; a BudgetExceeded where the outcome is ``refused``."""


OnEnd: TypeAlias = Callable[[Scope, Report], object]

_S = TypeVar("_S", bound="Serving")

_SERVING: ContextVar["Serving | None"] = ContextVar("ctxalloc.serving", default=None)


class Routes:
    """Patterns of paths, and what each has."""

    def __init__(self, routes: Mapping[str, Choice]) -> None:
        self._exact: dict[str, tuple[str, Choice]] = {}
        self._patterns: list[tuple[str | None, re.Pattern[str], str, Choice]] = []
        self._has_methods = False
        for route, choice in routes.items():
            method, path = _pattern(route)
            self._has_methods |= method is not None
            if "{" in path:
                self._patterns.append((method, re.compile(_expression(path, route)), route, _checked(choice, route)))
            else:
                self._exact[route] = (route, _checked(choice, route))

    def find(self, method: str | None, path: str) -> tuple[str, Choice] | None:
        """The route of a path: one with the method before one without, one without parameters before one with."""
        if self._has_methods and method is not None:
            found = self._exact.get(f"{method} {path}")
            if found is not None:
                return found
        found = self._exact.get(path)
        if found is not None or not self._patterns:
            return found
        for wanted, pattern, route, choice in self._patterns:
            if (wanted is None or wanted == method) and pattern.fullmatch(path):
                return route, choice
        return None


def _pattern(route: str) -> tuple[str | None, str]:
    method, space, path = route.partition(" ")
    if not space:
        method, path = "", route
    if not path.startswith("/") or (space and not method.isupper()):
        raise ValueError(f"routes: {route!r} is no pattern; write '/path', '/path/{{name}}' or 'POST /path'")
    return method or None, path


def _expression(path: str, route: str) -> str:
    parts = re.split(r"\{(\w+(?::\w+)?)\}", path)
    texts, names = parts[::2], parts[1::2]
    if any("{" in text or "}" in text for text in texts):
        raise ValueError(f"routes: {route!r} has a brace too many; a parameter is '{{name}}' or '{{name:path}}'")
    expressions = [".*" if name.endswith(":path") else "[^/]+" for name in names]
    return "".join(re.escape(text) + expression for text, expression in zip(texts, [*expressions, ""], strict=True))


def _checked(choice: Choice, where: str) -> Choice:
    if choice is None or isinstance(choice, (Request, Handler, str)) or callable(choice):
        return choice
    raise TypeError(
        f"{where}: {choice!r} is no choice; give a ctxalloc.request(...), a Handler, the name of one, None, or a "
        "function that returns one of them"
    )


class Service:
    """The options of a middleware."""

    def __init__(
        self,
        *,
        routes: Mapping[str, Choice] | None,
        default: Choice,
        tenant: Callable[[Scope], Budget | None] | None,
        on_end: OnEnd | None,
        retry_after_seconds: int,
        peak_header: str | None,
    ) -> None:
        self.routes = Routes(routes or {})
        self.default = _checked(default, "default")
        self.tenant = tenant
        self.on_end = on_end
        self.retry_after_seconds = retry_after_seconds
        self.peak_header = peak_header

    def begin(
        self, scope: Scope, method: str | None, path: str, kind: "type[_S]", *, selects: bool = False
    ) -> "_S | None":
        """Begin to serve a request, as a Serving of that kind; None where there is nothing to do for it.

        ``selects``: what has an account is selected, until ``request._leave()``; else ``Serving.select`` does it.
        """
        found = self.routes.find(method, path)
        route, choice = (None, self.default) if found is None else found
        here = _SERVING.get()
        is_inside = here is not None and scope.get(KEY) is here
        base = current() if here is None else here.base
        if isinstance(choice, Request):  # first, as most are; and it is callable too, as a decorator
            asked = choice
        else:
            terms = choice if choice is None or isinstance(choice, (Handler, str)) else choice(scope)
            if terms is None:
                if here is None or is_inside:
                    return None
                return kind(self, scope, route, None, base, base, None)
            if not isinstance(terms, Request):
                return kind(self, scope, route, None, terms, base, None)
            asked = terms
        tenant = None
        if self.tenant is not None:
            tenant = self.tenant(scope)
            if tenant is not None and asked._wanted_budget is not None:  # noqa: SLF001 - made for this, here and below
                raise ValueError(
                    f"route {route!r}: its terms name a budget and so does `tenant`; a request has one: leave the "
                    "terms' out, or make it the parent of the tenants'"
                )
        if selects:
            begun, handler = asked._serve(not is_inside, route, tenant), None  # noqa: SLF001
        else:
            begun = asked._again(root=not is_inside, name=route, budget=tenant)  # noqa: SLF001
            handler = begun._begin()  # noqa: SLF001
        if tenant is None and is_inside and here is not None:
            tenant = here.tenant  # which it is charged to as well, by the request around it
        return kind(self, scope, route, begun, handler, base, tenant)


class Serving:
    """One request of a server, from its beginning to its end."""

    # Defaults on the class: most requests need none of their own.
    status: int | None = None
    """The status of the answer, once it is begun."""
    is_disconnected = False
    """The client has gone, and somebody heard of it."""
    _refusal: BudgetExceeded | None = None
    _rights: list[None] | None = None
    _began = 0.0

    def __init__(  # noqa: PLR0917 - one call, on the way of every request
        self,
        service: Service,
        scope: Scope,
        route: str | None,
        begun: Request | None,
        handler: Handler | str | None,
        base: Handler,
        tenant: Budget | None,
    ) -> None:
        self.service = service
        self.scope: Scope | None = scope
        self.route = route
        self.request = begun
        self.handler = handler
        self.base = base
        self.tenant = tenant
        if service.on_end is not None and begun is not None:
            # Whoever takes it may tell of the end: `pop` has one winner, in whatever thread.
            self._rights = [None]
            self._began = time.perf_counter()

    def select(self) -> tuple[Token, ContextToken["Serving | None"]]:
        """Select its handler in the running Context, until ``deselect``."""
        mark = _SERVING.set(self)
        try:
            return set_handler(self.handler), mark
        except BaseException:
            _SERVING.reset(mark)
            raise

    @staticmethod
    def deselect(selected: tuple[Token, ContextToken["Serving | None"]]) -> None:
        """Undo it. ValueError: in another Context, of which nothing is changed."""
        token, mark = selected
        reset(token)
        _SERVING.reset(mark)

    def leave(self, mark: ContextToken["Serving | None"]) -> None:
        """Undo what ``Service.begin(selects=True)`` and ``mark_as_served`` selected."""
        assert self.request is not None  # noqa: S101 - for those that have an account
        try:
            self.request._leave()  # noqa: SLF001 - made for this
            _SERVING.reset(mark)
        except ValueError:
            # A server threw the coroutine away, which was closed in whatever Context: nothing is selected there.
            self.close()

    def close(self) -> None:
        """End the request, if it has not ended."""
        if self.request is not None:
            self.request._close()  # noqa: SLF001 - made for this

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """End the request and tell of it, if nobody has."""
        if self.request is not None:
            self.request._close()  # noqa: SLF001 - as above
            if self._rights:
                self._tell(outcome, error, self._rights)

    def end_unanswered(self, error: BaseException | None) -> None:
        """The same, where no whole answer was sent: by an exception, or without one."""
        if error is None:
            self.end("disconnected" if self.is_disconnected else "unfinished")
        elif self.is_disconnected:
            self.end("disconnected", error)
        elif isinstance(error, Exception):
            self.end("failed", error)
        else:
            self.end("cancelled", error)

    def _tell(self, outcome: Outcome, error: BaseException | None, rights: list[None]) -> None:
        try:
            rights.pop()
        except IndexError:
            return
        begun, scope, on_end = self.request, self.scope, self.service.on_end
        assert begun is not None  # noqa: S101 - else there were no rights
        escaped = begun.escaped
        assert scope is not None  # noqa: S101 - let go of below only
        assert on_end is not None  # noqa: S101
        assert escaped is not None  # noqa: S101 - it has ended
        seconds = time.perf_counter() - self._began
        report = Report(self.route, outcome, self.status, seconds, begun.stats, escaped, error)
        try:
            with use(self.base):  # what it makes is not the request's
                on_end(scope, report)
        except Exception:
            log.exception("on_end raised; its request (route %r) has ended all the same", self.route)

    def refusal_of(self, error: BaseException) -> BudgetExceeded | None:
        """The refusal that led to an exception; None where another reason did."""
        error = _leaf(error)
        if isinstance(error, BudgetExceeded):
            return error
        if not isinstance(error, MemoryError) or self.request is None:
            return None
        if self._refusal is not None and self._refusal.__cause__ is error:
            return self._refusal
        try:
            self.request._raise_refusal(error)  # noqa: SLF001 - made for this
        except BudgetExceeded as refused:
            self._refusal = refused.with_traceback(None)
        except RequestEnded:
            return None
        else:
            return None
        return self._refusal

    def forget(self) -> None:
        """Let go of the scope and of the refusal, whose traceback holds arrays and may hold this."""
        self.scope = None
        self._refusal = None


class Step:
    """A stretch of a request's work, with its handler selected: the application's call, or one part of the body."""

    __slots__ = ("_selected", "serving")

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def __enter__(self) -> None:
        self._selected = self.serving.select()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(ValueError):  # thrown away, and closed in another Context: nothing is selected there
            self.serving.deselect(self._selected)


def _leaf(error: BaseException) -> BaseException:
    """The one exception in a group of one: task groups wrap what their tasks raise."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


mark_as_served: Final = _SERVING.set
"""Says in the running Context whose request it serves, until ``Serving.leave``."""


def serving() -> Serving | None:
    """The request of a server that the running Context serves."""
    return _SERVING.get()


def refusal(error: BaseException) -> BudgetExceeded | None:
    """See ``problems.refusal``."""
    if isinstance(error, BudgetExceeded):
        return error
    here = _SERVING.get()
    return None if here is None else here.refusal_of(error)


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Opts out of the request: what is started inside of the block belongs to no request.

    In a request of a middleware that is the selection around the server; else NumPy's default handler. For work that
    outlives the request and is not its own: a cache that is filled, a task that runs for ever::

        with ctxalloc.detached():
            asyncio.create_task(refresh_for_ever())
    """
    here = _SERVING.get()
    mark = _SERVING.set(None)
    try:
        with use(None if here is None else here.base):
            yield
    finally:
        _SERVING.reset(mark)
