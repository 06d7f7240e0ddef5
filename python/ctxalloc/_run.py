"""Runs somebody's program under a handler and a limit, and reports what its arrays took."""

import atexit
import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TextIO

from ctxalloc import _native, _program, metrics, strategies
from ctxalloc._errors import BudgetExceeded, UnknownHandlerError
from ctxalloc._executors import wrap
from ctxalloc._native import _whole_nobodys_bytes
from ctxalloc._profile import Profile, profiled
from ctxalloc._program import Program, UsageError
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


def check_handler(name: str) -> None:
    """UsageError: there is no handler of that name."""
    try:
        _native.handler(name)
    except UnknownHandlerError as error:
        raise UsageError(f"--handler {name}: {error}") from None


def run(program: Program, handler: str | None, limit: int | None, *, report: TextIO | None, whole: bool = False) -> int:
    """Runs it; its exit status. UsageError: it cannot be run as asked."""
    program.check()
    if handler is not None:
        check_handler(handler)
    if limit is not None and (handler or "default_allocator") not in STRATEGIES:
        raise UsageError(f"--limit goes with one of {', '.join(STRATEGIES)}, not with --handler {handler}")
    request: _native.Request | None = None
    if limit is not None or whole:
        strategy = None if whole and handler is None else STRATEGIES[handler or "default_allocator"]()
        request = _begun(program, limit, strategy, whole=whole)
        _carry()
    elif handler is not None:
        _native.set_handler(handler)
        _carry()
    withdraw = (
        None if report is None else _report_at_the_end(program, handler, limit, report, request if whole else None)
    )
    try:
        return _status_of(program, request)
    except UsageError:
        if withdraw is not None:
            withdraw()
        raise


def _begun(program: Program, limit: int | None, strategy: _native.Strategy | None, *, whole: bool) -> _native.Request:
    """The request around it. UsageError: the whole of it cannot be counted here."""
    try:
        return _native.request(limit_bytes=limit, strategy=strategy, name=program.name, root=True, whole=whole)
    except RuntimeError as error:
        raise UsageError(f"--whole: {error}") from None


def _print_whole(stats: _native.Stats, out: TextIO) -> None:
    if stats.whole is None:
        return
    parts = stats.whole
    print(
        f"  the whole program: {size_text(stats.peak_bytes)} at the peak; alive at the end: "
        f"{size_text(parts.array_bytes)} of arrays, {size_text(parts.native_bytes)} of native memory, "
        f"{size_text(parts.object_bytes)} of objects, give or take {size_text(parts.error_bytes)}",
        file=out,
    )
    nobodys = _whole_nobodys_bytes()
    print(f"  asked for while nobody was selected, by libraries' own threads: {size_text(nobodys)}", file=out)


class _Begun:
    def __init__(self) -> None:
        self.wall = time.perf_counter()
        self.usage = resource.getrusage(resource.RUSAGE_SELF)


def _report_at_the_end(
    program: Program, handler: str | None, limit: int | None, out: TextIO, whole: _native.Request | None
) -> Callable[[], None]:
    """When the program's threads have ended and what it registered with ``atexit`` has run; in this process only.

    What it returns takes that back.
    """
    begun, own = _Begun(), os.getpid()
    profiling = contextlib.ExitStack()
    profile = profiling.enter_context(profiled())

    def report() -> None:
        if os.getpid() != own or out.closed:  # a child of fork that ends as a program does; nowhere to write to
            return
        profiling.close()
        with contextlib.suppress(OSError):  # nobody reads on
            _print(program, handler, limit, profile, begun, out)
            if whole is not None:
                _print_whole(whole.stats, out)

    atexit.register(report)
    return lambda: atexit.unregister(report)


def _status_of(program: Program, request: _native.Request | None) -> int:
    """What the interpreter would exit with. KeyboardInterrupt, already printed: it was interrupted."""
    try:
        with request or contextlib.nullcontext():
            program.execute()
    except UsageError:
        raise
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # the program's: it ends here
        if isinstance(error, BudgetExceeded) and error.__cause__ is not None:
            # It was raised here, from the program's MemoryError.
            error.__cause__.with_traceback(_of_the_program(error.__cause__.__traceback__))
            error.with_traceback(None)
        else:
            error.with_traceback(_of_the_program(error.__traceback__))
        _tell(error)
        if isinstance(error, KeyboardInterrupt):
            # The interpreter ends by the signal itself if this is what ends it, as shells want to know. Whether a
            # subclass does so too is the interpreter's to say: 3.14 says yes, those before it no.
            sys.excepthook = lambda *_: None
            raise
        return 1
    return 0


def _tell(error: BaseException) -> None:
    """By the program's own hook, as the interpreter does."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as worse:  # noqa: BLE001 - the hook's
        print("Error in sys.excepthook:", file=sys.stderr)
        worse.__context__ = None
        sys.__excepthook__(type(worse), worse, worse.with_traceback(_of_the_program(worse.__traceback__)).__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that ran it."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in _OWN_FILES:
        rest = rest.tb_next
    return rest


_OWN_FILES: Final = frozenset({__file__, _program.__file__})


def _carry() -> None:
    """Threads that the program starts have their starter's selection: else they would begin with NumPy's default."""
    start = threading.Thread.start

    def start_carrying(thread: threading.Thread) -> None:
        own, run = thread.__dict__.get("run"), wrap(thread.run)

        def run_once() -> None:
            # Else the thread would refer to itself, and live until the next collection.
            del thread.__dict__["run"]
            if own is not None:
                thread.__dict__["run"] = own
            run()

        thread.run = run_once  # type: ignore[method-assign] # as Thread(target=wrap(..)) would
        start(thread)

    threading.Thread.start = start_carrying  # type: ignore[method-assign, assignment] # its name differs


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
