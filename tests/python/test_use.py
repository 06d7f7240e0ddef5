"""`ctxalloc.use()` as a context manager: with, async with, refused, and left where it was not entered.

How blocks nest, in tasks and threads and in any order, the random programs of `tests/oracle` compare with CPython.
"""

import asyncio
import contextlib
import contextvars
import copy
import pickle
import threading
from collections.abc import Coroutine

import numpy as np
import pytest

import ctxalloc
from ctxalloc import current, use


def test_a_block_selects_and_restores() -> None:
    before = current()
    with use("aligned64") as handler:
        assert handler is current() is ctxalloc.handler("aligned64")
        inside = np.ones(1000)
    assert current() is before
    after = np.ones(1000)
    assert ctxalloc.handler_of(inside) is handler
    assert ctxalloc.handler_of(after) is before
    assert inside.ctypes.data % 64 == 0


@pytest.mark.parametrize("subject", ["aligned64", ctxalloc.handler("aligned64")])
def test_a_handler_is_named_by_its_object_or_its_name(subject: str | ctxalloc.Handler) -> None:
    with use(subject):
        assert current().name == "aligned64"


def test_none_selects_numpys_default() -> None:
    with use("aligned64"), use(None) as default:
        assert default is current()
        assert current().name == "default_allocator" == ctxalloc.get_handler_name()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_what_is_raised_passes_through_and_the_selection_is_restored(error: type[BaseException]) -> None:
    own = error("mine")
    with pytest.raises(error) as caught, use("aligned64"):
        raise own
    assert caught.value is own
    assert own.__context__ is None
    assert current().name == "default_allocator"


def test_a_scope_says_what_it_selects_and_whether_it_is_entered() -> None:
    scope = use("aligned64")
    assert repr(scope) == '<ctxalloc.use("aligned64")>'
    assert scope.handler.name == "aligned64"
    with scope:
        assert repr(scope) == '<ctxalloc.use("aligned64"), entered>'
    assert repr(scope) == '<ctxalloc.use("aligned64")>'


def test_a_scope_entered_twice_is_refused_and_stays_entered() -> None:
    scope = use("aligned64")
    with scope, use("system"):
        with pytest.raises(RuntimeError, match=r'use\("aligned64"\) is entered already; call use\(\) again'):
            scope.__enter__()
        assert current().name == "system"
    assert current().name == "default_allocator"


def test_leaving_what_was_not_entered_is_refused() -> None:
    scope = use("aligned64")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r'use\("aligned64"\) is not entered'):
            scope.__exit__(None, None, None)
        with scope:
            pass


def test_a_scope_left_in_another_context_can_still_be_left_in_its_own() -> None:
    scope = use("aligned64")
    own = contextvars.copy_context()
    own.run(scope.__enter__)

    def leave_elsewhere() -> None:
        with use("system"):
            with pytest.raises(ValueError, match="was entered in another Context") as caught:
                scope.__exit__(None, None, None)
            assert isinstance(caught.value.__cause__, ValueError)  # contextvars' own words
            assert current().name == "system"

    leave_elsewhere()
    contextvars.copy_context().run(leave_elsewhere)
    thread = threading.Thread(target=leave_elsewhere)
    thread.start()
    thread.join()
    assert own.run(current).name == "aligned64"
    assert "entered" in repr(scope)
    own.run(scope.__exit__, None, None, None)
    assert own.run(current).name == "default_allocator"
    with scope:  # and used again, here
        assert current().name == "aligned64"


def test_an_error_on_leaving_keeps_the_error_of_the_block() -> None:
    # The block's KeyError must not be lost behind the scope's ValueError.
    scope = use("aligned64")
    contextvars.copy_context().run(scope.__enter__)

    def block() -> None:
        with contextlib.ExitStack() as stack:
            stack.push(scope)
            raise KeyError("the block's own")

    with pytest.raises(ValueError, match="another Context") as caught:
        block()
    assert isinstance(caught.value.__context__, KeyError)


@pytest.mark.parametrize(
    ("subject", "error", "words"),
    [
        (
            "no such handler",
            ctxalloc.UnknownHandlerError,
            "no handler is named 'no such handler'; registered are: system",
        ),
        ("", ctxalloc.UnknownHandlerError, "no handler is named ''"),
        (64, TypeError, "a handler is wanted: .* got 'int'"),
        (b"system", TypeError, "got 'bytes'"),
        (ctxalloc.strategies.System(), TypeError, "got 'System'"),
        (ctxalloc.handler("system").capsule, TypeError, "got 'PyCapsule'"),
    ],
)
def test_what_names_no_handler_is_refused_at_the_call(subject: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        use(subject)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        ctxalloc.set_handler(subject)  # type: ignore[arg-type]
    assert current().name == "default_allocator"


def test_scopes_and_tokens_are_made_by_functions_only_and_do_not_travel() -> None:
    for kind in (ctxalloc.Scope, ctxalloc.Token, ctxalloc.Handler):
        with pytest.raises(TypeError):
            kind()
    for thing in (use("system"), ctxalloc.set_handler(None)):
        with pytest.raises(TypeError):
            pickle.dumps(thing)
        with pytest.raises(TypeError):
            copy.copy(thing)
        with pytest.raises(AttributeError):
            thing.handler = None  # type: ignore[union-attr,misc]


# ---- async with --------------------------------------------------------------------------------------


def test_an_async_scope_entered_twice_is_refused() -> None:
    async def main() -> None:
        scope = use("aligned64")
        async with scope:
            with pytest.raises(RuntimeError, match="entered already"):
                await scope.__aenter__()
            with pytest.raises(RuntimeError, match="entered already"):
                scope.__enter__()
        with pytest.raises(RuntimeError, match="not entered"):
            await scope.__aexit__(None, None, None)

    asyncio.run(main())


def test_entering_happens_where_it_is_awaited() -> None:
    async def main() -> None:
        scope = use("aligned64")
        entering = scope.__aenter__()
        assert current().name == "default_allocator"
        assert repr(scope) == '<ctxalloc.use("aligned64")>'
        assert await entering is current()
        assert current().name == "aligned64"
        with pytest.raises(RuntimeError, match="entered already"):
            await entering
        leaving = scope.__aexit__(None, None, None)
        assert current().name == "aligned64"
        await leaving
        assert current().name == "default_allocator"

    asyncio.run(main())


def test_entering_and_leaving_are_coroutines_that_a_task_can_run() -> None:
    async def main() -> None:
        scope = use("aligned64")
        assert isinstance(scope.__aenter__(), Coroutine)
        handler = await asyncio.create_task(scope.__aenter__())  # in the task's own Context
        assert handler.name == "aligned64"
        assert current().name == "default_allocator"
        with pytest.raises(ValueError, match="another Context"):
            await scope.__aexit__(None, None, None)
        step = use("aligned64").__aenter__()
        with pytest.raises(KeyError):
            step.throw(KeyError)
        step.close()
        with pytest.raises(StopIteration):
            step.send(None)
        assert current().name == "aligned64"
        ctxalloc.set_handler(None)

    asyncio.run(main())


def test_an_entry_that_is_never_awaited_does_nothing() -> None:
    scope = use("aligned64")
    scope.__aenter__()  # type: ignore[unused-coroutine]  # and no warning, which would be an error here
    with scope:
        scope.__aexit__(None, None, None)  # type: ignore[unused-coroutine]
        assert current().name == "aligned64"
