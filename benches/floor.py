"""What of an array's and of a request's time is NumPy's and CPython's own, beside what is ours.

`floor.c`, compiled here, has NEP 49 handlers that do next to nothing, a context manager and an ASGI middleware that do
the calls to ContextVar that a request needs and no others: nobody outside of NumPy and CPython can take less. They are
measured in the same run as `pool`, `request()` and `ctxalloc.asgi`, in turn, medians; the middlewares around the light
route of `services.py`, without a server. Where valgrind is installed, callgrind counts the instructions too: those do
not depend on what else the machine does. Numbers go to target/bench/floor.json.
Options: --rounds N, --quick, --counts (instructions only).
"""

import argparse
import asyncio
import contextlib
import contextvars
import functools
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import OUT, Loop, Row, keep, loop, machine, medians, row_of, table
from harness.served import ROUTE, Application, http_scope, multiplies
from harness.served import SIZES as LIGHT

import ctxalloc
from ctxalloc.asgi import AllocatorMiddleware

KIB: Final = 1 << 10
SIZES: Final = (8, 64, 512, 1000, 512 * KIB, 1024 * KIB, 2048 * KIB)
DEFAULT: Final = "NumPy's default"
MALLOC: Final = "floor: malloc, free, nothing else"
LIST: Final = "floor: a list of blocks of one size"
POOL: Final = "pool"
REQUEST: Final = "in a request()"
CONTEXT_VAR: Final = "ContextVar: t = var.set(x); var.reset(t)"
MANAGER: Final = "floor: a manager that sets and resets"
WITH_CAPSULE: Final = "floor: the same, with a capsule of its own"
BARE: Final = "with request(): pass"
NAMED: Final = "with a limit, a budget and a name"
FLOOR_NAMED: Final = "floor: with a capsule, three options unread"
ROUTE_ALONE: Final = "without a middleware"
FLOOR_EXCHANGE: Final = "floor: a middleware in C, set and reset"
FLOOR_PYTHON: Final = "the same in Python"
ACCOUNT: Final = "ctxalloc.asgi, an account"
LIMITED: Final = "ctxalloc.asgi, a route, a limit and a tenant"
COUNTED_LOOPS: Final = 1000
Selecting = Callable[[], contextlib.AbstractContextManager[object]]


def compiled() -> Any:
    """The module of `floor.c`, compiled anew."""
    OUT.mkdir(parents=True, exist_ok=True)
    place = OUT / f"_floor{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if "_FLOOR" not in os.environ:  # else the process that started this one has done it
        headers = [sysconfig.get_paths()["include"], np.get_include()]
        compiler = os.environ.get("CC", "cc")
        flags = ["-shared", "-fPIC", "-O3", "-DNDEBUG", "-Wall", *(f"-I{header}" for header in headers)]
        subprocess.run([compiler, *flags, Path(__file__).with_suffix(".c"), "-o", place], check=True)
    spec = importlib.util.spec_from_file_location("_floor", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def selections(floor: Any, size: int) -> dict[str, Selecting]:
    """Who is measured, and how each is selected."""

    @contextlib.contextmanager
    def selected(capsule: object) -> Iterator[None]:
        before = floor.select(capsule)
        try:
            yield
        finally:
            floor.select(before)

    plain, of_one_size = floor.handler(0), floor.handler(max(size, 16))
    return {
        DEFAULT: lambda: selected(None),
        MALLOC: lambda: selected(plain),
        LIST: lambda: selected(of_one_size),
        POOL: lambda: ctxalloc.use("pool"),
        REQUEST: ctxalloc.request,
    }


def arrays(floor: Any, rounds: int) -> dict[str, dict[str, Row]]:
    """`np.empty` and its end, under each."""
    results = {}
    for size in SIZES:
        run = loop("e(n, d)", e=np.empty, n=size, d=np.uint8)
        ways = selections(floor, size)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, selecting in ways.items():
                with selecting():
                    run(200)  # the one before may have left it cold
                    times[name].append(run(1500))
        results[str(size)] = rows = {name: row_of(all_times) for name, all_times in times.items()}
        table(f"np.empty of {size} bytes, and its end", rows, DEFAULT)
    return results


def request_loops(floor: Any) -> dict[str, Loop]:
    """Entering and leaving with nothing in it."""
    var: contextvars.ContextVar[object] = contextvars.ContextVar("bench")
    tenant = ctxalloc.Budget(1 << 30)
    options = "(limit_bytes=1000, name='bench', budget=tenant)"
    plain, own = floor.manager, floor.manager_with_capsule
    return {
        CONTEXT_VAR: loop("t = var.set(x); var.reset(t)", var=var, x=1),
        "contextlib.nullcontext": loop("with n():\n    pass", n=contextlib.nullcontext),
        MANAGER: loop("with m():\n    pass", m=plain),
        WITH_CAPSULE: loop("with m():\n    pass", m=own),
        FLOOR_NAMED: loop(f"with m{options}:\n    pass", m=own, tenant=tenant),
        BARE: loop("with request():\n    pass", request=ctxalloc.request),
        NAMED: loop(f"with request{options}:\n    pass", request=ctxalloc.request, tenant=tenant),
    }


def requests(floor: Any, rounds: int) -> dict[str, Row]:
    """The same in turn."""
    loops = request_loops(floor)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, run in loops.items():
            run(30)
            times[name].append(run(300))  # so short that others seldom get the processor meanwhile
    rows = {name: row_of(all_times) for name, all_times in times.items()}
    table("a request with nothing in it", rows, CONTEXT_VAR)
    return rows


class InPython:
    """The floor's middleware, in Python."""

    def __init__(self, app: Application, floor: Any) -> None:
        self.app, self.var, self.capsule = app, floor.numpys_variable(), floor.capsule

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI entry point."""
        token = self.var.set(self.capsule())
        try:
            await self.app(scope, receive, send)
        finally:
            self.var.reset(token)


def route_loops(floor: Any) -> dict[str, Loop]:
    """A call of the light route, under each middleware."""
    tenant = ctxalloc.Budget(1 << 30, parent=ctxalloc.Budget(1 << 40))
    terms: Any = {ROUTE: ctxalloc.request(limit_bytes=1 << 30)}
    apps: dict[str, Application] = {
        ROUTE_ALONE: multiplies,
        FLOOR_EXCHANGE: functools.partial(floor.exchange, multiplies),
        FLOOR_PYTHON: InPython(multiplies, floor),
        ACCOUNT: AllocatorMiddleware(multiplies),
        LIMITED: AllocatorMiddleware(multiplies, routes=terms, tenant=lambda _: tenant),
    }
    return {name: route_loop(app) for name, app in apps.items()}


def route_loop(app: Application) -> Loop:
    """One call, and a turn of asyncio's loop, in which a server gets its next request."""
    scope = http_scope(f"/multiply/{LIGHT['arrays of 8 kB']}")

    async def receive() -> Any: ...

    async def send(message: Any) -> None: ...

    async def call_it(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            await app(scope, receive, send)
            await asyncio.sleep(0)
        return (time.perf_counter() - begun) / count * 1e9

    loop = asyncio.new_event_loop()
    return lambda count: loop.run_until_complete(call_it(count))


def routes(floor: Any, rounds: int) -> dict[str, Row]:
    """The same in turn."""
    rows = medians(route_loops(floor), rounds, 50)  # so short that others seldom get the processor meanwhile
    table("the light route", rows, ROUTE_ALONE)
    return rows


def counted_works(floor: Any) -> Iterator[tuple[str, str, Loop, Selecting]]:
    """What is counted: its table, its name, the loop, and what is selected around it. The first is an empty loop."""
    yield "", "", loop("pass"), contextlib.nullcontext
    for name, run in request_loops(floor).items():
        yield "a request", name, run, contextlib.nullcontext
    for name, run in route_loops(floor).items():
        yield "the light route", name, run, contextlib.nullcontext
    for size in SIZES:
        run = loop("e(n, d)", e=np.empty, n=size, d=np.uint8)
        for name, selecting in selections(floor, size).items():
            yield f"np.empty of {size} bytes", name, run, selecting


def be_counted(floor: Any) -> None:
    """What callgrind watches: it counts inside of `counted`, and writes a file at each end of it."""
    for _, _, run, selecting in counted_works(floor):
        with selecting():
            run(200)
            floor.counted(run, COUNTED_LOOPS)


def instructions(floor: Any) -> dict[str, dict[str, float]]:
    """Instructions of one turn of each loop, less those of an empty one; nothing without valgrind."""
    if shutil.which("valgrind") is None:
        print("\nwithout instructions: install valgrind to have them counted")
        return {}
    with tempfile.TemporaryDirectory() as place:
        command = ["valgrind", "--tool=callgrind", "--toggle-collect=counted", "--dump-after=counted"]
        command += [f"--callgrind-out-file={place}/out", sys.executable, __file__, "--be-counted"]
        environment = {**os.environ, "_FLOOR": "compiled"}
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        found = {}
        for path in Path(place).glob("out.*"):
            total = re.search(r"^(?:summary|totals): (\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            if path.suffix[1:].isdigit() and total is not None:
                found[int(path.suffix[1:])] = int(total[1]) / COUNTED_LOOPS
    works = [work[:2] for work in counted_works(floor)]
    each = [found[number] for number in sorted(found)][: len(works)]
    counts: dict[str, dict[str, float]] = {}
    for (title, name), count in zip(works[1:], each[1:], strict=True):
        counts.setdefault(title, {})[name] = count - each[0]
    for title, of in counts.items():
        first = next(iter(of.values()))
        print(f"\ninstructions: {title}")
        for name, count in of.items():
            print(f"{name:48}{count:9.0f}{count / first:8.2f}x")
    return counts


def main() -> int:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41, help="how often each has its turn")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    parser.add_argument("--counts", action="store_true", help="instructions only")
    parser.add_argument("--be-counted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    floor = compiled()
    if options.be_counted:
        be_counted(floor)
        return 0
    if options.counts:
        instructions(floor)
        return 0
    rounds = 5 if options.quick else options.rounds
    print(f"{machine()}; {rounds} rounds, medians")
    measured = {"arrays": arrays(floor, rounds), "requests": requests(floor, rounds), "routes": routes(floor, rounds)}
    keep("floor", {"rounds": rounds, **measured, "instructions": instructions(floor)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
