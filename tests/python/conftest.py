"""What all tests here share: each starts and ends with nothing selected, and registers under names of its own.

The table lives as long as the process; tests that would change it for others run Python anew. Beside the fixtures here
there are these modules: `subprocesses` (Python in a process of its own), `commands` (`ctxalloc` in this one),
`patience` (waiting with a limit), `resident` (how much memory a process has), `numpy_c` (NumPy's C side by ctypes),
`c_extensions` (extensions in C, compiled), `built_in` (the handlers that are there from the start), `documents` (the
Python in Markdown, run).
"""

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from types import ModuleType
from typing import Any

import built_in  # noqa: F401  # first: it looks at the table before any test changes it
import c_extensions
import numpy as np
import patience
import pytest

import ctxalloc

_numbers = itertools.count()

# A shell starts what it does not wait for (`make test &`) without Ctrl-C, and programs inherit that: those that tests
# interrupt would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """What a program said that failed, which `CalledProcessError` does not tell by itself."""
    try:
        return (yield)
    except subprocess.CalledProcessError as error:
        error.add_note(f"{error.output or ''}{error.stderr or ''}")
        raise


@pytest.fixture(autouse=True)
def nothing_is_selected() -> Iterator[None]:
    """A test that leaves a handler selected, a variable set or threads changed would change what the next one sees."""
    assert ctxalloc.current().name == "default_allocator"
    before, start = environment(), threading.Thread.start
    yield
    assert environment() == before, "the test left the environment another one"
    assert threading.Thread.start is start, "the test left threads that begin otherwise"
    left = ctxalloc.current().name
    ctxalloc.set_handler(None)
    assert left == "default_allocator", f"the test left {left!r} selected"


def environment() -> dict[str, str]:
    """What the programs that this process starts are told."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="session", autouse=True)
def names_are_left() -> Iterator[None]:
    """Metrics have room for 128 names. A test that takes many runs Python anew; another one would not find its own."""
    yield
    taken = list(ctxalloc.metrics.snapshot().series)
    assert len(taken) < 120, f"a test of this process took too many names: {taken}"


@pytest.fixture
def fresh_name(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Names that no handler has."""
    return lambda: f"{request.node.name[:100]}-{next(_numbers)}"


@pytest.fixture
def fresh_handler(fresh_name: Callable[[], str]) -> Callable[[], ctxalloc.Handler]:
    """Handlers that nobody else uses."""
    return lambda: ctxalloc.register(fresh_name(), ctxalloc.strategies.Aligned(align=64))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    """`asyncio.run` on each kind of event loop."""
    factory = None if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    def run(main: Awaitable[Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(patiently(main))

    async def patiently(main: Awaitable[Any]) -> Any:
        async with asyncio.timeout(patience.SECONDS):
            return await main

    return run


@pytest.fixture
def may_lock() -> None:
    """Skips the test where this process may not lock memory."""
    with ctxalloc.use("locked"):
        try:
            np.empty(64 * ctxalloc.MiB, np.uint8)
        except MemoryError:
            pytest.skip("this process may not lock 64 MiB (ulimit -l)")


@pytest.fixture
def collect() -> Callable[[], None]:
    """Collects garbage, and what its finalizers leave."""

    def collect() -> None:
        for _ in range(3):
            gc.collect()

    return collect


def pytest_collection_finish() -> None:
    """Takes what the imports made out of the garbage collector's sight: 200,000 objects, and no garbage.

    Many tests collect, and each time would look at all of it again: a tenth of a second instead of milliseconds.
    What a test makes is looked at as ever. Hypothesis makes its random numbers at the first use, and warns if it does
    not find who holds them: on CPython 3.14 a dict made by its import does, which the collector would no longer show.
    Where it is not installed (platforms.mk: musl) the tests that are run do without it.
    """
    if "hypothesis" in sys.modules:
        from hypothesis import given
        from hypothesis.strategies import none

        given(none())(lambda _: None)()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def earlier_modules_are_not_looked_at_again() -> None:
    """The same for what the tests of earlier modules have imported; their garbage is collected first."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"ctxalloc {ctxalloc.__version__} selects by {ctxalloc._native.selection}, numpy {np.__version__}"


@pytest.fixture(scope="module")
def final() -> ModuleType:
    module = c_extensions.built("final_nep49")
    assert module.register() == "headed, final"
    assert module.register() == "headed, final"  # the same struct, the same handler
    return module


@pytest.fixture(scope="module")
def draft1() -> ModuleType:
    return c_extensions.built("first_draft")


@pytest.fixture(scope="module")
def draft2() -> ModuleType:
    return c_extensions.built("second_draft")


@pytest.fixture
def all_is_in_order(final: ModuleType, draft1: ModuleType, draft2: ModuleType) -> Iterator[None]:
    """Each of the three allocators finds its blocks as it left them, with the GIL held at each call."""
    before = [module.counts()["alive"] for module in (final, draft1, draft2)]
    yield
    gc.collect()
    for module, alive in zip((final, draft1, draft2), before, strict=True):
        assert module.counts() == {"alive": alive, "wrong_sizes": 0, "not_ours": 0, "without_gil": 0}
