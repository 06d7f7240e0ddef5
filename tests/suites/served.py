"""pytest plugin: the tests of another package, each of them served in the way that `--served` names.

    default     as the package's own authors run them
    NAME        a built-in handler is selected for the whole run (pool, system, ...)
    request     each test, fixtures and all, in a `ctxalloc.request()` of its own
    limited     the same with a limit, a shared budget and its parent, whose numbers must agree at the end
    whole       each in a `ctxalloc.request(whole=True)`; the process has the library before malloc
    faulty:7    each test's own part in a request whose memory fails now and then: at random, the same for one seed
    plain:7     the same without ctxalloc, which is not even imported: a handler written in C (failing.c)

`--outcomes FILE` gets a line when a test begins and one when it ends: what a crash interrupted is told by it, and a
second run with the same file goes on after it. run.py starts pytest with this plugin and compares.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
from carried_threads import START_WITH_THE_DEFAULT, CarriedThreads

FAULTS: Final = 0.03  # the share of arrays that cannot be made under faulty: and plain:
LIMIT_BYTES: Final = 1 << 42  # above what any test gets from the system: what fails by itself still does


class Served:
    """The default: nothing is changed. The others derive from it."""

    complaints: list[str]

    def __init__(self) -> None:
        self.complaints = []

    def around_test(self, test: str) -> AbstractContextManager[object]:  # with its fixtures and its report
        return nullcontext()

    def around_call(self, test: str) -> AbstractContextManager[object]:  # the test's own function only
        return nullcontext()

    def look(self, test: str, when: str) -> None:
        """Before and after each test."""

    def close(self) -> None:
        """After the last test."""


class ServedByHandler(Served):
    """One handler for the whole run."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import ctxalloc  # not under plain:

        self.handler = ctxalloc.handler(name)
        self.select = ctxalloc.set_handler
        self.current = ctxalloc.current
        self.select(self.handler)

    def look(self, test: str, when: str) -> None:
        if self.current() is not self.handler:
            self.complaints.append(f"{when} {test} another handler was selected: {self.current()!r}")
            self.select(self.handler)


class ServedByRequests(Served):
    """A request for each test."""

    def __init__(self, *, limited: bool, whole: bool = False) -> None:
        super().__init__()
        import ctxalloc

        self.ctxalloc, self.whole = ctxalloc, whole
        self.process = ctxalloc.Budget(name="process") if limited else None
        self.suite = ctxalloc.Budget(LIMIT_BYTES, parent=self.process, name="suite") if limited else None
        self.requests: list[Any] = []

    def around_test(self, test: str) -> AbstractContextManager[object]:
        limit = LIMIT_BYTES if self.suite is not None else None
        self.requests.append(
            self.ctxalloc.request(name=test[-100:], limit_bytes=limit, budget=self.suite, whole=self.whole)
        )
        return self.requests[-1]  # type: ignore[no-any-return]

    def look(self, test: str, when: str) -> None:
        request = self.requests[-1]
        if self.ctxalloc.current() != request.handler or self.ctxalloc.current_request() is None:
            self.complaints.append(f"{when} {test} its request was not the current one: {self.ctxalloc.current()!r}")
            self.ctxalloc.set_handler(request.handler)

    def close(self) -> None:
        live = sum(request.stats.live_bytes for request in self.requests)
        blocks = sum(request.stats.live_blocks for request in self.requests)
        total = sum(request.stats.count for request in self.requests)
        print(f"{len(self.requests)} requests made {total} blocks; {blocks} are alive, of {live} bytes")
        if not total:
            self.complaints.append("no array was made in any request")
        for budget in (self.suite, self.process):
            if budget is not None and budget.in_use_bytes != live:
                self.complaints.append(f"{budget!r} and the sum of its requests disagree: {live}")


class ServedWithFaults(Served):
    """Arrays fail now and then, by `ctxalloc.strategies.Faulty`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        import ctxalloc

        self.ctxalloc, self.seed, self.upstream = ctxalloc, seed, ctxalloc.strategies.Pool()

    def around_call(self, test: str) -> AbstractContextManager[object]:
        seed = zlib.crc32(test.encode()) ^ self.seed
        faulty = self.ctxalloc.strategies.Faulty(self.upstream, probability=FAULTS, seed=seed)
        return self.ctxalloc.request(strategy=faulty, after_end="detach")


class ServedByPlainC(Served):
    """Arrays fail now and then, by C code that knows nothing of us."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        import numpy_c

        self.seed, self.set_handler = seed, numpy_c.set_handler
        with tempfile.TemporaryDirectory() as folder:
            library, source = Path(folder, "failing.so"), Path(__file__).with_name("failing.c")
            command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
            subprocess.run(command, check=True)
            self.library = ctypes.CDLL(str(library))
        self.library.failing_begin.argtypes = [ctypes.c_double, ctypes.c_uint64]
        struct = ctypes.c_char.in_dll(self.library, "failing_handler")
        self.capsule = numpy_c.capsule_around(ctypes.addressof(struct))

    def around_call(self, test: str) -> AbstractContextManager[object]:
        if "ctxalloc" in sys.modules:  # said before a crash: nothing is, after it
            raise RuntimeError("ctxalloc was imported: this run shows nothing")
        self.library.failing_begin(FAULTS, zlib.crc32(test.encode()) ^ self.seed)
        return _Selected(self)


class _Selected:
    def __init__(self, served: ServedByPlainC) -> None:
        self.served = served

    def __enter__(self) -> None:
        self.old = self.served.set_handler(self.served.capsule)

    def __exit__(self, *error: object) -> None:
        self.served.set_handler(self.old)


def made(way: str) -> Served:
    """What `--served` names."""
    match way.split(":"):
        case ["default"]:
            return Served()
        case ["request" | "limited" | "whole"]:
            return ServedByRequests(limited=way == "limited", whole=way == "whole")
        case ["faulty", seed]:
            return ServedWithFaults(int(seed))
        case ["plain", seed]:
            return ServedByPlainC(int(seed))
        case _:
            return ServedByHandler(way)


def name_of(item: pytest.Item) -> str:
    """The file and what is in it, as pytest takes it: a node id is relative to a folder of pytest's choice."""
    _, *inside = item.nodeid.split("::", 1)
    return "::".join((str(item.path), *inside))


class Plugin:
    """Writes the outcomes, and has each test served."""

    def __init__(self, served: Served, outcomes: Path) -> None:
        self.served = served
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        self.done = {json.loads(line)["test"] for line in lines}
        self.out = outcomes.open("a", buffering=1)  # a line at a time: a crash loses none
        self.test = ""  # that runs now
        self.threads = CarriedThreads()
        self.threads.install()

    def tell(self, test: str, what: str, **more: object) -> None:
        self.out.write(json.dumps({"test": test, "what": what, **more}) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Go on after what an earlier run with the same file has done."""
        left_out = [item for item in items if name_of(item) in self.done]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if name_of(item) not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.test = name_of(item)
        self.tell(self.test, "began")
        self.threads.on = not item.nodeid.endswith(START_WITH_THE_DEFAULT)
        with self.served.around_test(self.test):
            self.served.look(self.test, "before")
            try:
                return (yield)
            finally:
                self.served.look(self.test, "after")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with self.served.around_call(self.test):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell(self.test, "failed", when=report.when, why=str(report.longrepr)[-400:])
        elif report.when == "call" or report.skipped:
            self.tell(self.test, report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.served.close()
        for complaint in self.served.complaints:
            self.tell("", "complaint", why=complaint)
        self.tell("", "closed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--served", metavar="WAY", required=True, help="default, request, limited, pool, faulty:SEED, ...")
    parser.addoption("--outcomes", metavar="FILE", required=True, type=Path, help="a line for each beginning and end")


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module is imported."""
    served = made(config.getoption("--served"))
    config.pluginmanager.register(Plugin(served, config.getoption("--outcomes")), "ctxalloc-served")
