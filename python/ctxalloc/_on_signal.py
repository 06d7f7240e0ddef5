"""A profile of a service that runs, when a signal asks for it. Before that nothing is paid but a handler of a signal.

The signal's handler starts a thread and returns; the thread does the rest. ``_profile`` counts, ``_flame`` writes.
"""

import atexit
import contextlib
import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Final

log = logging.getLogger("ctxalloc")

_MAX_SECONDS: Final = 86_400.0


class _OnSignal:
    """What a signal starts."""

    def __init__(self, seconds: float, path: Path) -> None:
        self._seconds = seconds
        self._path = path
        self._reset()
        atexit.register(self._finish)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _reset(self) -> None:
        self._running = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._profiling = contextlib.ExitStack()

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        """The handler. It runs between any two instructions of the main thread: it takes no lock and logs nothing."""
        threading.Thread(target=self._run, name="ctxalloc profile", daemon=True).start()

    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            log.warning("a profile is running already in process %d; this signal is ignored", os.getpid())
            return
        try:
            self._thread = threading.current_thread()
            self._profile()
        except Exception:
            log.exception("the profile that a signal asked for failed")
        finally:
            self._thread = None
            self._running.release()

    def _profile(self) -> None:
        from ctxalloc import _files, _flame, _profile  # noqa: PLC0415 - for those who ask

        try:
            profile = self._profiling.enter_context(_profile.profiled(_flame.FRAMES))
        except RuntimeError as error:
            log.warning("this signal is ignored: %s", error)
            return
        log.info("a profile of %g s begins in process %d", self._seconds, os.getpid())
        self._ends.wait(self._seconds)
        self._profiling.close()
        path = self._free_path(_flame.SUFFIXES)
        title = f"ctxalloc: {self._seconds:g} s of process {os.getpid()}"
        _files.write_private(path, _flame.written_as(path, profile, title))
        log.info("the profile is in %s", path)

    def _free_path(self, suffixes: tuple[str, ...]) -> Path:
        """With the process's number, and the first number that no file has yet."""
        suffix = next(suffix for suffix in suffixes if self._path.name.endswith(suffix))
        stem, number = self._path.name.removesuffix(suffix), 1
        while os.path.lexists(path := self._path.with_name(f"{stem}-{os.getpid()}-{number}{suffix}")):
            number += 1
        return path

    def _finish(self) -> None:
        """The process ends: what there is so far is written."""
        self._ends.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _forked(self) -> None:
        """In a child, which has no thread that would end the profile."""
        if self._running.locked():
            from ctxalloc import _profile  # noqa: PLC0415 - it was imported for the profile

            with contextlib.suppress(ValueError):  # the parent's thread was just beginning or ending it
                self._profiling.close()
            _profile.forget()
        self._reset()


def profile_on_signal(signum: int, /, *, seconds: float = 10.0, path: str | os.PathLike[str] = "ctxalloc.html") -> None:
    """Profiles the arrays of this process for so many seconds whenever it gets a signal.

    ``path``: where the profile goes: a flame graph (``.html``), folded stacks (``.folded``) or pprof (``.pb.gz``).
    The file appears as a whole, for its owner only, and has the process and a number in its name:
    ``ctxalloc-4711-1.html``. A signal while a profile is running is ignored; both say so in the log ``ctxalloc``.
    Arrays that were made before are not in it. An event hook is not called meanwhile, and is set again at the end.
    Until the first signal this costs nothing. Call it in the main thread; a second call for the signal replaces the
    first one's terms.

    ValueError: the seconds or the path are not of use, the signal has another handler, or this is not the main thread.
    """
    from ctxalloc import _flame  # noqa: PLC0415 - for those who ask

    given: object = seconds
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= _MAX_SECONDS:
        raise ValueError(f"profile_on_signal(seconds={seconds!r}): give a number above 0, and at most {_MAX_SECONDS:g}")
    target = Path(path).absolute()  # the program may change its directory
    if not _flame.has_format(target):
        raise ValueError(f"profile_on_signal(path={str(path)!r}): give a name that ends with .html, .folded or .pb.gz")
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"profile_on_signal(path={str(path)!r}): no file can be written there; give another folder")
    before = signal.getsignal(signum)
    if before not in (signal.SIG_DFL, signal.SIG_IGN) and not isinstance(before, _OnSignal):
        raise ValueError(f"profile_on_signal({signum!r}): the signal has a handler already, {before!r}; give another")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("profile_on_signal: signals have handlers in the main thread only; call it there")
    signal.signal(signum, _OnSignal(float(seconds), target))
