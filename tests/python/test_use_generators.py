"""`@ctxalloc.use()` on generators: a context of their own across every `yield` (test_use_async_generators.py: async).

What the body selects is seen by the body only and lasts from step to step; what the caller selects stays the
caller's. Everything else is as without the decorator: the parity tests run each body plain and decorated.
"""

import contextlib
import contextvars
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

import ctxalloc
from ctxalloc import current, set_handler, use


def name_here() -> str:
    return current().name


@use("aligned64")
def numbers(count: int) -> Generator[tuple[int, str], Any, str]:
    """Counts."""
    for number in range(count):
        yield number, name_here()
    return "done in " + name_here()


def test_a_generators_scope_does_not_leak_into_its_caller() -> None:
    seen = []
    for number, inside in numbers(3):
        seen.append((number, inside, name_here()))
        set_handler("system")  # the caller's own, which must survive the next step
    assert seen == [
        (0, "aligned64", "default_allocator"),
        (1, "aligned64", "system"),
        (2, "aligned64", "system"),
    ]
    assert current().name == "system"
    set_handler(None)


def test_what_the_body_selects_lasts_from_step_to_step() -> None:
    @use("aligned64")
    def body() -> Iterator[str]:
        yield name_here()
        token = set_handler("system")
        yield name_here()
        yield name_here()
        ctxalloc.reset(token)
        yield name_here()
        with use(None):
            yield name_here()
        yield name_here()

    steps = body()
    seen = []
    for inside in steps:
        assert current().name == "default_allocator"
        with use("system"):
            seen.append(inside)
    assert seen == ["aligned64", "system", "system", "aligned64", "default_allocator", "aligned64"]


def test_two_generators_of_one_function_do_not_see_each_other() -> None:
    @use("aligned64")
    def body(own: str) -> Iterator[str]:
        set_handler(own)
        while True:
            yield name_here()

    left, right = body("system"), body("default_allocator")
    assert [next(left), next(right), next(left), next(right)] == ["system", "default_allocator"] * 2
    assert current().name == "default_allocator"


def test_a_generator_may_be_stepped_from_other_threads_and_contexts() -> None:
    steps = numbers(4)
    assert next(steps) == (0, "aligned64")
    assert contextvars.copy_context().run(next, steps) == (1, "aligned64")
    seen: list[Any] = []

    def in_thread() -> None:
        with use("system"):
            seen.append((next(steps), name_here()))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [((2, "aligned64"), "system")]
    assert next(steps) == (3, "aligned64")
    assert next(steps, None) is None
    assert current().name == "default_allocator"


def test_other_context_variables_stay_the_callers() -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    @use("aligned64")
    def body() -> Iterator[str]:
        yield variable.get()
        variable.set("by the body")
        yield variable.get()

    steps = body()
    token = variable.set("by the caller")
    assert next(steps) == "by the caller"
    assert next(steps) == variable.get() == "by the body"  # as PEP 567 leaves it
    variable.reset(token)


def test_the_first_step_and_no_earlier_calls_the_body() -> None:
    begun = []

    @use("aligned64")
    def body() -> Iterator[None]:
        begun.append(name_here())
        yield

    steps = body()
    assert begun == []
    next(steps)
    assert begun == ["aligned64"]
    steps.close()  # type: ignore[attr-defined]
    body().close()  # type: ignore[attr-defined]  # never begun: nothing to close
    assert begun == ["aligned64"]


def test_finalizers_of_a_collected_generator_run_in_its_scope(collect: Callable[[], None]) -> None:
    seen = []

    @use("aligned64")
    def body() -> Iterator[None]:
        try:
            yield
        finally:
            seen.append(name_here())

    steps = body()
    next(steps)
    del steps
    collect()
    assert seen == ["aligned64"]
    assert current().name == "default_allocator"


def test_a_contextmanager_function_can_be_decorated() -> None:
    @contextlib.contextmanager
    @use("aligned64")
    def opened() -> Iterator[str]:
        yield name_here()

    with opened() as inside:
        assert (inside, name_here()) == ("aligned64", "default_allocator")


def test_decorated_generators_look_like_themselves() -> None:
    assert inspect.isgeneratorfunction(numbers)
    assert inspect.isgenerator(numbers(1))
    assert (numbers.__name__, numbers.__doc__) == ("numbers", "Counts.")
    assert list(inspect.signature(numbers).parameters) == ["count"]


# Bodies that exercise what a caller can do to a generator. Each script is a list of what the caller does.


def echoes() -> Generator[Any, Any, Any]:
    """Answers what it is sent, and stops at None."""
    got = yield "ready"
    while got is not None:
        got = yield ("echo", got)
    return "returned"


def catches() -> Generator[Any, Any, Any]:
    """Answers the exceptions thrown into it, until a KeyError."""
    while True:
        try:
            yield "waiting"
        except KeyError:
            return "key error"
        except ValueError as error:
            yield ("caught", *error.args)


def swallows_exit() -> Generator[Any, Any, Any]:
    """Returns a value when it is closed."""
    try:
        yield "open"
    except GeneratorExit:
        return "value of close"


def ignores_exit() -> Generator[Any, Any, Any]:
    """Yields when it is closed, which is an error."""
    while True:
        with contextlib.suppress(GeneratorExit):
            yield "still here"


def fails_on_exit() -> Generator[Any, Any, Any]:
    """Raises when it is closed."""
    try:
        yield "open"
    finally:
        raise LookupError("on exit")


def leaks_stop() -> Generator[Any, Any, Any]:
    """Lets a StopIteration out, which PEP 479 turns into a RuntimeError."""
    yield "before"
    raise StopIteration("inside")  # noqa: PLR1708


Step = tuple[str, Any]
SCRIPTS: list[tuple[Callable[[], Generator[Any, Any, Any]], list[Step]]] = [
    (echoes, [("send", None), ("send", 1), ("send", "two"), ("send", None), ("send", None)]),
    (echoes, [("send", 1)]),  # not begun: TypeError
    (echoes, [("throw", KeyError("early")), ("send", None)]),
    (echoes, [("close", None), ("send", None)]),
    (echoes, [("send", None), ("close", None), ("close", None), ("send", None)]),
    (catches, [("send", None), ("throw", ValueError(7)), ("send", None), ("throw", KeyError()), ("send", None)]),
    (catches, [("send", None), ("throw", ValueError), ("throw", ValueError(8)), ("throw", OSError(9, "out"))]),
    (catches, [("send", None), ("throw", StopIteration("thrown"))]),
    (catches, [("send", None), ("throw", KeyboardInterrupt())]),
    (swallows_exit, [("send", None), ("close", None), ("send", None)]),
    (swallows_exit, [("send", None), ("throw", GeneratorExit())]),
    (ignores_exit, [("send", None), ("throw", GeneratorExit()), ("close", None), ("send", None)]),
    (fails_on_exit, [("send", None), ("close", None), ("send", None)]),
    (leaks_stop, [("send", None), ("send", None)]),
]


def outcome_of(step: Callable[[], Any]) -> Any:
    try:
        return ("gave", step())
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt is among them
        chain = [repr(link) for link in (error.__cause__, error.__context__)]
        return (type(error), error.args, chain)


def play(steps: Generator[Any, Any, Any], script: list[Step]) -> list[Any]:
    seen = []
    for action, argument in script:
        arguments = () if action == "close" else (argument,)
        seen.append(outcome_of(lambda: getattr(steps, action)(*arguments)))  # noqa: B023
        assert current().name == "default_allocator"
    return seen


@pytest.mark.parametrize(("body", "script"), SCRIPTS)
def test_send_throw_and_close_do_what_the_plain_generator_does(
    body: Callable[[], Generator[Any, Any, Any]], script: list[Step]
) -> None:
    with warnings_off():
        assert play(use("aligned64")(body)(), script) == play(body(), script)


@contextlib.contextmanager
def warnings_off() -> Iterator[None]:
    """A generator that ignores its end complains when it is collected, decorated or not."""
    heard, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = heard


@pytest.mark.parametrize("decorate", [lambda body: body, use("aligned64")], ids=["plain", "decorated"])
def test_an_exception_thrown_in_leaves_no_cycle_behind(decorate: Callable[[Any], Any]) -> None:
    # Traceback -> the wrapper's frame -> what it was about to throw -> traceback. A plain generator has none.
    def body() -> Iterator[None]:
        yield

    def throws() -> weakref.ref[Traced]:
        steps = decorate(body)()
        next(steps)
        thrown = Traced("thrown")
        remembered = weakref.ref(thrown)
        with contextlib.suppress(Traced):
            steps.throw(thrown)
        del steps, thrown  # this frame is in the traceback too
        return remembered

    gc.collect()
    gc.disable()
    try:
        assert throws()() is None
    finally:
        gc.enable()


class Traced(Exception):  # noqa: N818
    """An exception that can be watched."""
