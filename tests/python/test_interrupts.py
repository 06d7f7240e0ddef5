"""What is no ``Exception`` (an interrupt, an exit, a cancelled task) is never dropped where we ask Python something."""

import _thread
import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

import ctxalloc

INTERRUPTS = [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit]


def raising(kind: type[BaseException]) -> Any:
    def ask(*_: object) -> NoReturn:
        raise kind

    return ask


def raise_in_a_refused_request(error: BaseException) -> None:
    with ctxalloc.request(limit_bytes=100, strict=True):
        with pytest.raises(MemoryError):
            np.ones(1000)
        raise error


@pytest.mark.parametrize("kind", [*INTERRUPTS, ValueError])
@pytest.mark.parametrize("attribute", ["_total_size", "__str__", "args"])
def test_no_code_of_an_error_runs_where_a_refusal_is_looked_for(kind: type[BaseException], attribute: str) -> None:
    """What it raised would be another exception than the program's, or be dropped."""
    body = raising(kind)
    error = type("Ours", (MemoryError,), {attribute: body if attribute == "__str__" else property(body)})
    with pytest.raises(error):
        raise_in_a_refused_request(error())


def interrupting_text() -> Any:
    """As ``__repr__`` or ``__str__``: a text that C code makes, after which a signal's handler is due.

    Bytecode would run the handler before it returns the text.
    """
    return staticmethod(functools.partial(str.join, "", filter(_thread.interrupt_main, [signal.SIGINT])))


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def go_on_after(kind: type[BaseException], work: Any) -> None:
    with contextlib.suppress(kind):
        work()
    for _ in range(10):  # bytecode that runs the handler, if nobody has
        pass


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_is_due_after_a_repr_is_not_dropped() -> None:
    shown: Any = type("Shown", (), {"__repr__": interrupting_text()})()
    with pytest.raises(KeyboardInterrupt):
        go_on_after(TypeError, lambda: ctxalloc.request(limit_bytes=shown))


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_an_interrupt_while_an_argument_is_read_or_shown_is_raised(kind: type[BaseException]) -> None:
    shown = type("Shown", (), {"__repr__": raising(kind)})()
    read = type("Read", (), {"__index__": raising(kind), "__float__": raising(kind), "__iter__": raising(kind)})()
    for given in (shown, read):
        with pytest.raises(kind):
            ctxalloc.request(limit_bytes=given)
    with pytest.raises(kind):
        ctxalloc.request(after_end=shown)
    with pytest.raises(kind):
        ctxalloc.strategies.Aligned(align=shown)
    with pytest.raises(kind):
        ctxalloc.tracking.report(read)


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_an_interrupt_while_threads_are_named_is_raised(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Thread:
        name = "ours"
        native_id = property(raising(kind))

    with ctxalloc.use("tracked"):
        array = np.ones(1000)
    monkeypatch.setattr(threading, "enumerate", lambda: [Thread()])
    with pytest.raises(kind):
        ctxalloc.handler("tracked").live_blocks()
    del array


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """A signal every millisecond, whose handler raises KeyboardInterrupt where the list is not empty."""
    armed: list[int] = []

    def handler(number: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    yield armed
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# From 3.12 on CPython may look for signals where a loop jumps back, which its table of `try` blocks does not cover.
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="an interrupt may come out past the `try` around the loop")
@pytest.mark.skipif("CTXALLOC_STRESS" not in os.environ, reason="by chance, in `make stress`; those above are certain")
def test_stress_each_of_many_interrupts_comes_out_of_a_refusal(
    interrupts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    came = 0
    of_numpy: list[str] = []  # it drops an interrupt of its own while it makes its error, and says so

    def unraisable(given: Any) -> None:
        assert str(given.object).startswith("Unable to allocate")
        of_numpy.append(given.object)

    monkeypatch.setattr(sys, "unraisablehook", unraisable)
    for _ in range(300):
        try:
            interrupts.append(1)
            while interrupts:
                try:
                    with ctxalloc.request(limit_bytes=100, strict=True):
                        np.ones(1000)
                except ctxalloc.BudgetExceeded:
                    pass
        except KeyboardInterrupt:
            came += 1
    assert came + len(of_numpy) == 300
