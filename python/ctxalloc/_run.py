"""Runs somebody's program under a handler and a limit, and reports what its arrays took."""

import _posixsubprocess
import atexit
import contextlib
import functools
import io
import os
import resource
import subprocess  # noqa: F401 - it has its own `fork_exec` before `_Children` comes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import _files, _flame, _native, _program, _report, _standard_error, _starting, metrics, strategies
from ctxalloc._errors import BudgetExceeded, UnknownHandlerError
from ctxalloc._executors import wrap
from ctxalloc._profile import FRAMES, Profile, profiled
from ctxalloc._program import Program, UsageError
from ctxalloc._text import counted, say, size_text, table

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


def run(
    program: Program,
    handler: str | None,
    limit: int | None,
    *,
    report: "Wanted | None",
    whole: bool = False,
    record: Path | None = None,
) -> int:
    """Runs it; its exit status. UsageError: it cannot be run as asked; RefusedError: ``python`` itself would not."""
    if handler is not None:
        check_handler(handler)
    if report is not None and report.path is not None:
        option = "--report=" if report.is_by_stack else "--output "
        try:
            report = report._replace(target=_files.target_of(report.path))
        except OSError as error:
            said = f"no file can be written there ({error.strerror}); give one in a folder that is yours"
            raise UsageError(f"{option}{report.path}: {said}") from None
    if (limit is not None or record is not None) and (handler or "default_allocator") not in STRATEGIES:
        option = "--record" if limit is None else "--limit"
        raise UsageError(f"{option} goes with one of {', '.join(STRATEGIES)}, not with --handler {handler}")
    request: _native.Request | None = None
    nothing_ran = contextlib.ExitStack()
    if record is not None:
        _record(record)
        nothing_ran.callback(_withdraw_recording, record)
    if limit is not None or whole or record is not None:
        strategy = None if whole and handler is None else STRATEGIES[handler or "default_allocator"]()
        # A recording has names, and no paths.
        name = program.name if record is None else Path(program.name).name
        request = _begun(name, limit, strategy, whole=whole)
        nothing_ran.callback(_carry())
    elif handler is not None:
        _native.set_handler(handler)
        nothing_ran.callback(_native.set_handler, None)
        nothing_ran.callback(_carry())
    counted_whole = _Whole(request) if whole and request is not None else None
    ending = None if report is None else _report_at_the_end(program, handler, limit, report, counted_whole)
    if ending is not None:
        nothing_ran.callback(ending.withdraw)
    try:
        status = _status_of(program, request)
    except UsageError:
        nothing_ran.close()
        raise
    if ending is not None:
        ending.status = status
    return status


def _record(path: Path) -> None:
    """Records this process, and those that it starts, until they end. UsageError: it cannot."""
    if path.exists():
        raise UsageError(f"--record {path}: it is there; remove it, or set CTXALLOC_RECORD={path} to add to it")
    _starting.undo.append(functools.partial(_withdraw_recording, path))
    try:
        # The first request is the program, which has all others inside of it: it must not be left out.
        _RECORDING.append(_native._record_program(path))  # noqa: SLF001 - for this
    except (OSError, ValueError) as error:
        raise UsageError(f"--record: {error}") from None
    for name, value in (("CTXALLOC_RECORD", str(path.absolute())), ("CTXALLOC_RECORD_ONE_IN", "1")):
        _FOR_CHILDREN[name], os.environ[name] = os.environ.get(name), value


def _withdraw_recording(path: Path) -> None:
    """Nothing ran: the file would only be in the way of the next try."""
    while _RECORDING:
        _RECORDING.pop().stop()
    while _FOR_CHILDREN:
        name, before = _FOR_CHILDREN.popitem()
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    with contextlib.suppress(OSError):
        path.unlink()


_RECORDING: Final[list[_native.Recorder]] = []
"""Until the process ends: ``_environment`` completes it."""

_FOR_CHILDREN: Final[dict[str, str | None]] = {}
"""What the environment said before a recording was begun."""

_GROUPS_SHOWN: Final = 8
"""Groups of threads whose memory is nobody's."""


class Wanted(NamedTuple):
    """A report: how, and where."""

    is_json: bool
    path: Path | None
    """None: to standard error."""
    sites: int
    """How many a table shows; JSON has all."""
    is_by_stack: bool = False
    """As the end of the file's name says: a flame graph, folded stacks, pprof."""
    target: _files.Target | None = None
    """What the path named when the program began."""


class _Children:
    """Counts the processes that the program forks or starts. Those that C code starts, or a child, are not seen."""

    EVENTS: Final = frozenset({"os.fork", "os.forkpty", "subprocess.Popen", "os.posix_spawn", "os.system"})

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._hear)
        # multiprocessing's way to spawn, which raises no event; subprocess has a name of its own for it.
        start = _posixsubprocess.fork_exec

        def fork_exec(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return start(*args, **kwargs)

        _posixsubprocess.fork_exec = fork_exec

    def _hear(self, event: str, _arguments: object) -> None:
        # From 3.13 on subprocess may call posix_spawn, after an event of its own.
        is_of_subprocess = event == "os.posix_spawn" and _caller() == "subprocess"
        if event in self.EVENTS and not is_of_subprocess:
            self.count += 1


def _caller() -> Any:
    """The module that called what raised an audit event."""
    return sys._getframe(2).f_globals.get("__name__")  # noqa: SLF001 - documented, for CPython


def _begun(name: str, limit: int | None, strategy: _native.Strategy | None, *, whole: bool) -> _native.Request:
    """The request around it. UsageError: the whole of it cannot be counted here."""
    try:
        return _native.request(limit_bytes=limit, strategy=strategy, name=name, root=True, whole=whole)
    except RuntimeError as error:
        raise UsageError(f"--whole: {error}") from None


class _Whole:
    """The program's request, if it counts the whole of it, and what was nobody's meanwhile."""

    def __init__(self, request: _native.Request) -> None:
        self._request = request
        self._before = _native._whole_nobodys() or {}  # noqa: SLF001 - made for this

    def parts(self) -> _native.WholeStats | None:
        return self._request.stats.whole

    def nobodys(self) -> dict[str, int]:
        """What was nobody's since then, by thread, the largest first."""
        now = _native._whole_nobodys() or {}  # noqa: SLF001 - made for this
        since = {thread: size_bytes - self._before.get(thread, 0) for thread, size_bytes in now.items()}
        return {thread: since[thread] for thread in sorted(since, key=lambda thread: -since[thread]) if since[thread]}

    def known(self) -> dict[str, Any] | None:
        """For JSON."""
        parts = self.parts()
        if parts is None:
            return None
        fields = [name for name in dir(parts) if not name.startswith("_")]
        return {**{name: getattr(parts, name) for name in fields}, "nobodys_by_thread": self.nobodys()}

    def print(self, out: TextIO) -> None:
        """What it counted."""
        parts = self.parts()
        if parts is None:
            return
        say(
            f"  the whole program: {size_text(parts.peak_bytes)} at the peak; alive at the end: "
            f"{size_text(parts.array_bytes)} of arrays, {size_text(parts.native_bytes)} of native memory, "
            f"{size_text(parts.object_bytes)} of objects, give or take {size_text(parts.error_bytes)}",
            file=out,
        )
        by_thread = self.nobodys()
        shown = [f"{size_text(size_bytes)} by {thread}" for thread, size_bytes in by_thread.items()][:_GROUPS_SHOWN]
        say(
            f"  beside it, asked for and charged to nobody: {size_text(sum(by_thread.values()))}"
            f"{': ' if shown else ''}{', '.join(shown)}",
            file=out,
        )


class _Begun:
    def __init__(self) -> None:
        self.wall = time.perf_counter()
        self.usage = resource.getrusage(resource.RUSAGE_SELF)

    def usage_since(self) -> _report.Usage:
        """What this process took since then."""
        now = resource.getrusage(resource.RUSAGE_SELF)
        return _report.Usage(
            time.perf_counter() - self.wall,
            now.ru_utime - self.usage.ru_utime,
            now.ru_stime - self.usage.ru_stime,
            now.ru_minflt + now.ru_majflt - self.usage.ru_minflt - self.usage.ru_majflt,
            now.ru_maxrss * 1024,
        )


class _Ending:
    """What is to be reported when the program has ended."""

    def __init__(self, report: Callable[["_Ending"], None]) -> None:
        self.status: int | None = None
        """The program's exit status; None: it ended otherwise, by an exception or a signal."""
        self._call = functools.partial(report, self)
        atexit.register(self._call)

    def withdraw(self) -> None:
        """There is nothing to report."""
        atexit.unregister(self._call)

    def fail(self) -> None:
        """Have the process end with 120, as ``python`` does where it cannot flush, if all went well until then."""
        if self.status == 0:
            sys.stderr = _Unflushable(sys.stderr)


class _Unflushable(io.TextIOBase):
    """Standard error as it is, but that it cannot be flushed. Nothing else changes a status while a process exits."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out

    def write(self, text: str) -> int:
        """Prints it at once."""
        if self._out is None:
            return len(text)
        self._out.write(text)
        self._out.flush()
        return len(text)

    def flush(self) -> None:
        """Fails."""
        raise OSError("a report was not written")


def _report_at_the_end(
    program: Program, handler: str | None, limit: int | None, wanted: "Wanted", whole: "_Whole | None"
) -> _Ending:
    """When the program's threads have ended and what it registered with ``atexit`` has run; in this process only."""
    begun, own, errors = _Begun(), os.getpid(), _standard_error.StandardError()
    profiling = contextlib.ExitStack()
    profile = profiling.enter_context(profiled(_flame.FRAMES if wanted.is_by_stack else FRAMES))
    children = _Children()

    def report(ending: _Ending) -> None:
        if os.getpid() != own:
            return  # a child of fork that ends as a program does
        out = errors.open() if wanted.target is None else io.StringIO()
        if out is None:
            ending.fail()  # nobody can be told
            return
        profiling.close()
        usage = begun.usage_since()
        try:
            if wanted.is_by_stack and wanted.target is not None:
                title = f"ctxalloc: {' '.join([program.name, *program.arguments])}"
                wanted.target.write(_flame.written_as(wanted.target.path, profile, title))
                return
            if wanted.is_json:
                known = None if whole is None else whole.known()
                text = _report.as_json(program, handler, limit, profile, usage, children.count, known)
                say(text, file=out, flush=True)
            else:
                _print(program, handler, limit, profile, usage, children, wanted.sites, whole, out)
                out.flush()
            if wanted.target is not None and isinstance(out, io.StringIO):
                wanted.target.write(out.getvalue().encode("utf-8", "backslashreplace"))
        except OSError as error:
            if wanted.target is not None:
                option = "--report=" if wanted.is_by_stack else "--output "
                with contextlib.suppress(OSError):
                    say(f"ctxalloc run: {option}{wanted.path}: {error.strerror}", file=errors.open() or io.StringIO())
            if wanted.target is not None or not isinstance(error, BrokenPipeError):  # else nobody reads on
                ending.fail()

    return _Ending(report)


def _status_of(program: Program, request: _native.Request | None) -> int:
    """What the interpreter would exit with. KeyboardInterrupt, already printed: it was interrupted."""
    try:
        with request or contextlib.nullcontext():
            _starting.is_over()
            program.execute()
    except UsageError:
        raise
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        say(end.code, file=sys.stderr)
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
        say("Error in sys.excepthook:", file=sys.stderr)
        worse.__context__ = None
        sys.__excepthook__(type(worse), worse, worse.with_traceback(_of_the_program(worse.__traceback__)).__traceback__)
        say("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that ran it."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in _OWN_FILES:
        rest = rest.tb_next
    return rest


_OWN_FILES: Final = frozenset({__file__, _program.__file__, "<frozen runpy>"})


def _carry() -> Callable[[], None]:
    """Threads that the program starts have their starter's selection: else they would begin with NumPy's default.

    What it gives undoes it.
    """
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
    return functools.partial(setattr, threading.Thread, "start", start)


def _print(  # noqa: PLR0917 - one call
    program: Program,
    handler: str | None,
    limit: int | None,
    profile: Profile,
    usage: _report.Usage,
    children: "_Children",
    sites: int,
    whole: "_Whole | None",
    out: TextIO,
) -> None:
    wall, user, system, faults, process_peak_bytes = usage
    terms = [f"handler {handler or 'as the program selects'}"]
    if limit is not None:
        terms.append(f"limit {size_text(limit)}")
    say(f"\nctxalloc: {' '.join([program.name, *program.arguments])} ({', '.join(terms)})", file=out)
    say(
        f"  {wall:.2f} s, CPU {user:.2f} s + {system:.2f} s in the system, {faults} page faults, "
        f"process at most {size_text(process_peak_bytes)}",
        file=out,
    )
    profile.print_sums(out)
    if whole is not None:
        whole.print(out)
    if children.count:
        say(f"  not in this report: {counted(children.count, 'child process', 'es')} or more", file=out)
    profile.print_handlers(out)
    profile.print_sites(out, sites)
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
