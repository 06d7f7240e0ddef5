"""pytest plugin: NumPy's tests run with one ctxalloc handler selected, and the run proves that it was.

The selection is made in the main context before anything is collected, checked before and after
every test, and carried into every thread that a test starts. A census looks at the arrays that the
tests compare and names the handler behind each. run.py starts pytest with this plugin.
"""

import ctypes
import os
import resource
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from carried_threads import START_WITH_THE_DEFAULT, CarriedThreads
from numpy._core.multiarray import get_handler_name
from numpy.testing._private import utils as numpy_testing

import ctxalloc


def _callbacks() -> ctxalloc.strategies.Callbacks:
    """Over the C heap, by the functions that an example has in C."""
    source = Path(__file__).parents[2] / "examples" / "adopt_c_functions.c"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "pool.so")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
        functions = ctypes.CDLL(str(library))
    blocks_alive = ctypes.c_size_t(0)
    names = ("malloc", "calloc", "realloc", "free")
    kept = {name: getattr(functions, f"pool_{name}") for name in names}
    _KEPT.append((blocks_alive, kept))
    return ctxalloc.strategies.Callbacks(
        ctx=ctypes.addressof(blocks_alive),
        **{name: ctypes.cast(function, ctypes.c_void_p).value for name, function in kept.items()},
    )


def _shared_memory() -> ctxalloc.strategies.SharedMemory:
    """A descriptor for each array: the suite has more of them at once than a shell allows by itself."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return ctxalloc.strategies.SharedMemory()


_KEPT: list[object] = []
_POOL = ctxalloc.strategies.Pool()
# Strategies without a handler of their own at import: registered for the run, under these names.
MADE_FOR_THE_RUN: dict[str, Callable[[], ctxalloc.strategies.Strategy]] = {
    "arena": ctxalloc.strategies.Arena,
    "budgeted": lambda: ctxalloc.strategies.Budgeted(_POOL, limit_bytes=1 << 44),
    "callbacks": _callbacks,
    "fallback": lambda: ctxalloc.strategies.Fallback(_POOL, ctxalloc.strategies.System()),
    "faulty": lambda: ctxalloc.strategies.Faulty(_POOL, every=1 << 60),
    "numa": lambda: ctxalloc.strategies.Numa(node=0),
    "sharedmemory": _shared_memory,
    "zeroing": lambda: ctxalloc.strategies.Zeroing(_POOL),
}

# Tests not run under a handler, and why (matched at the end of the test's id). Under all others every test is run.
_TOO_MANY_MAPPINGS: Final = "65,536 arrays at once, each a mapping of its own: Linux allows 65,530 (vm.max_map_count)"
NOT_RUN: Final[dict[str, dict[str, str]]] = {
    "sharedmemory": {
        "test_nditer.py::test_arbitrary_number_of_ops": _TOO_MANY_MAPPINGS,
        "test_nditer.py::test_arbitrary_number_of_ops_nested": _TOO_MANY_MAPPINGS,
    },
}


class Suite:
    """One run under one handler: keeps the selection, and the record of what was seen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.not_run = NOT_RUN.get(name, {})
        self.made_by: Counter[str] = Counter()
        self.tests = 0
        self.threads = CarriedThreads()
        self.started_elsewhere: list[str] = []
        self.left_another: list[str] = []
        ctxalloc.set_handler(name)

    # -- the census ---------------------------------------------------------------------------

    def look_at(self, value: object) -> None:
        """Count the handler that made the data of `value`, if it is an array over such data."""
        owner = value
        while isinstance(owner, np.ndarray) and not owner.flags.owndata:
            owner = owner.base
        if isinstance(owner, np.ndarray):
            self.made_by[get_handler_name(owner) or "none"] += 1

    def watch_comparisons(self) -> None:
        """Every `assert_equal`, `assert_allclose` and so on ends in this one function of NumPy's."""
        compare = numpy_testing.assert_array_compare

        def look_and_compare(comparison: Any, x: object, y: object, *args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            self.look_at(x)
            self.look_at(y)
            compare(comparison, x, y, *args, **kwargs)

        numpy_testing.assert_array_compare = look_and_compare

    # -- pytest's hooks -----------------------------------------------------------------------

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Take out what NOT_RUN names."""
        left_out = [item for item in items if item.nodeid.endswith(tuple(self.not_run))]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Look at the selection on both sides of a test, its fixtures included."""
        self.tests += 1
        if not self._serves():
            self.started_elsewhere.append(item.nodeid)
        self.threads.on = not item.nodeid.endswith(START_WITH_THE_DEFAULT)
        try:
            return (yield)
        finally:
            self.threads.on = True
            if not self._serves():
                self.left_another.append(item.nodeid)
                ctxalloc.set_handler(self.name)

    def _serves(self) -> bool:
        """Whether the handler is selected, and an array made now lives in it."""
        return get_handler_name() == self.name == get_handler_name(np.empty(3))

    def complaints(self) -> list[str]:
        """What shows that the handler did not serve this run; empty when it did."""
        found = [f"another handler was selected before {test}" for test in self.started_elsewhere]
        found += [f"{test} left another handler selected" for test in self.left_another]
        if set(self.made_by) != {self.name}:
            found.append(f"every array looked at must be made by {self.name}")
        return found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A green run that the handler did not serve is a failed run."""
        if self.complaints() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say who served."""
        makers = ", ".join(f"{name} {count}" for name, count in self.made_by.most_common())
        terminalreporter.section(f"handler {self.name}")
        terminalreporter.line(
            f"looked at before and after each of {self.tests} tests, carried into {self.threads.count} threads"
        )
        terminalreporter.line(f"{sum(self.made_by.values())} arrays looked at, made by: {makers}")
        for test, reason in self.not_run.items():
            terminalreporter.line(f"not run: {test}: {reason}")
        for complaint in self.complaints():
            terminalreporter.line(f"WRONG: {complaint}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one option: which handler."""
    parser.addoption("--handler", metavar="NAME", help="the ctxalloc handler to run the suite with")


def pytest_configure(config: pytest.Config) -> None:
    """Select the handler, before a test module is imported."""
    name = config.getoption("--handler")
    if name is None:
        message = f"--handler is missing: name one of {[h.name for h in ctxalloc.handlers()]}"
        raise pytest.UsageError(message)
    if name in MADE_FOR_THE_RUN:
        ctxalloc.register(name, MADE_FOR_THE_RUN[name]())
    try:
        suite = Suite(name)
    except ctxalloc.UnknownHandlerError as unknown:
        raise pytest.UsageError(str(unknown)) from None
    suite.watch_comparisons()
    suite.threads.install()
    config.pluginmanager.register(suite, "ctxalloc-suite")
