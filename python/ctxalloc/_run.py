"""Runs somebody's program under a handler and a limit, and reports what its arrays took."""

import contextlib
import importlib.util
import os
import resource
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import _native, metrics, strategies
from ctxalloc._errors import BudgetExceeded, UnknownHandlerError
from ctxalloc._executors import wrap
from ctxalloc._profile import Profile, profiled
from ctxalloc._text import size_text, table

STRATEGIES: Final[dict[str, Any]] = {
    "default_allocator": strategies.System,
    "system": strategies.System,
    "aligned64": strategies.Aligned,
    "pool": strategies.Pool,
    "hugepages": strategies.HugePages,
    "locked": strategies.Locked,
    "guard": strategies.Guard,
    "tracked": strategies.Tracked,
}
"""What a request with a limit is given where a handler is asked for."""


class UsageError(Exception):
    """The program cannot be run as asked."""


class Program(NamedTuple):
    """What to run."""

    name: str
    is_module: bool
    arguments: list[str]

    def check(self) -> None:
        """UsageError: there is no such program."""
        if not self.is_module:
            if not Path(self.name).exists():
                raise UsageError(f"there is no script {self.name!r} in {Path.cwd()}; for a module write -m {self.name}")
            return
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.util.find_spec(self.name)
        except (ImportError, ValueError):
            found = None
        finally:
            del sys.path[0]
        if found is None:
            raise UsageError(f"there is no module {self.name!r}; install it, or give the path of a script")

    def execute(self) -> dict[str, Any]:
        """As ``python`` runs it; its names at its end."""
        sys.argv[:] = [self.name, *self.arguments]
        if self.is_module:
            sys.path.insert(0, str(Path.cwd()))
            return runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        if Path(self.name).is_file():
            sys.path.insert(0, str(Path(self.name).resolve().parent))
        return runpy.run_path(self.name, run_name="__main__")


def check_handler(name: str) -> None:
    """UsageError: there is no handler of that name."""
    try:
        _native.handler(name)
    except UnknownHandlerError as error:
        raise UsageError(f"--handler {name}: {error}") from None


def run(program: Program, handler: str | None, limit: int | None, *, report: TextIO | None) -> int:
    """Runs it; its exit status. UsageError: it cannot be run as asked."""
    program.check()
    if handler is not None:
        check_handler(handler)
    if limit is not None and (handler or "default_allocator") not in STRATEGIES:
        raise UsageError(f"--limit goes with one of {', '.join(STRATEGIES)}, not with --handler {handler}")
    begun = _Begun()
    profile: Profile | None = None
    with contextlib.ExitStack() as stack:
        request: _native.Request | None = None
        if limit is not None:
            strategy = STRATEGIES[handler or "default_allocator"]()
            request = _native.request(limit_bytes=limit, strategy=strategy, name=program.name, root=True)
            stack.enter_context(_carried())
        elif handler is not None:
            stack.enter_context(_native.use(handler))
            stack.enter_context(_carried())
        if report is not None:
            profile = stack.enter_context(profiled())
        names: dict[str, Any] = {}
        status = _status_of(program, request, names)
    if report is not None and profile is not None:
        _print(program, handler, limit, profile, begun, report)
    return status


class _Begun:
    def __init__(self) -> None:
        self.wall = time.perf_counter()
        self.usage = resource.getrusage(resource.RUSAGE_SELF)


def _status_of(program: Program, request: _native.Request | None, names: dict[str, Any]) -> int:
    """What the interpreter would exit with. ``names`` gets what the program leaves, which is alive at its end."""
    try:
        with request or contextlib.nullcontext():
            names.update(program.execute())
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - it is the program's, and ends here
        if isinstance(error, BudgetExceeded) and error.__cause__ is not None:
            # It was raised here, from the program's MemoryError.
            error.__cause__.with_traceback(_of_the_program(error.__cause__.__traceback__))
            error.with_traceback(None)
        traceback.print_exception(type(error), error, _of_the_program(error.__traceback__))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of this file and of runpy."""
    here = {__file__, runpy.__file__, "<frozen runpy>"}
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in here:
        rest = rest.tb_next
    return rest or trace


@contextlib.contextmanager
def _carried() -> Iterator[None]:
    """Threads that the program starts have their starter's selection: else they would begin with NumPy's default."""
    start = threading.Thread.start

    def start_carrying(thread: threading.Thread) -> None:
        thread.run = wrap(thread.run)  # type: ignore[method-assign] # as Thread(target=wrap(..)) would
        start(thread)

    threading.Thread.start = start_carrying  # type: ignore[method-assign, assignment] # its name differs
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def _print(  # noqa: PLR0917 - one call
    program: Program, handler: str | None, limit: int | None, profile: Profile, begun: _Begun, out: TextIO
) -> None:
    now = resource.getrusage(resource.RUSAGE_SELF)
    faults = now.ru_minflt + now.ru_majflt - begun.usage.ru_minflt - begun.usage.ru_majflt
    user, system = now.ru_utime - begun.usage.ru_utime, now.ru_stime - begun.usage.ru_stime
    terms = [f"handler {handler or 'as the program selects'}"]
    if limit is not None:
        terms.append(f"limit {size_text(limit)}")
    wall = time.perf_counter() - begun.wall
    print(f"\nctxalloc: {' '.join([program.name, *program.arguments])} ({', '.join(terms)})", file=out)
    print(
        f"  {wall:.2f} s, CPU {user:.2f} s + {system:.2f} s in the system, {faults} page faults, "
        f"process at most {size_text(now.ru_maxrss * 1024)}",
        file=out,
    )
    sums = profile.all
    print(
        f"  arrays: {size_text(sums.peak_bytes)} at the peak, {size_text(sums.total_bytes)} in {sums.arrays} arrays, "
        f"{size_text(sums.live_bytes)} alive at the end, {profile.refused} refused",
        file=out,
    )
    if not profile.is_complete:
        print("  incomplete: the program set an event hook of its own (set_event_hook)", file=out)
    profile.print_handlers(out)
    profile.print_sites(out)
    series = sorted(metrics.snapshot().series.values(), key=lambda one: -one.max_peak_bytes)
    rows = [
        [
            one.name,
            str(one.requests),
            str(one.refused_requests),
            size_text(min(one.peak_bytes.quantile(0.5), one.max_peak_bytes)),
            size_text(one.max_peak_bytes),
            f"{one.escaped_blocks} ({size_text(one.escaped_bytes)})",
        ]
        for one in series
    ]
    table("Requests", ["name", "ended", "refused", "peak of half up to", "largest peak", "escapes"], rows, out)
    out.flush()


def environment_of(handler: str | None) -> dict[str, str]:
    """The environment for a run of its own."""
    environment = dict(os.environ)
    environment.pop("CTXALLOC_HANDLER", None)
    if handler is not None:
        environment["CTXALLOC_HANDLER"] = handler
    return environment
