"""The recording of a process, which middlewares and the adapters of clusters ask for: one, however many ask for it."""

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

from ctxalloc._native import Recorder, record


class _Running:
    """A recording, and how many want it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.wanted = 0


_RUNNING: Final[dict[Path, _Running]] = {}
"""``_environment`` completes it at the interpreter's exit."""

_ASKED: Final[dict[str, Path]] = {}
"""Of ``record_once``, which each run of a task may call: whatever the working directory is later."""

_CHANGING: Final = threading.Lock()


def path_of(path: object, where: str) -> str | None:
    """A recording's path as it travels to workers. TypeError: it is none."""
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{where}: record={path!r} is no path; give one on each worker's machine, or None")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{where}: record={path!r} is a path of bytes; give os.fsdecode({path!r})")
    return text


def record_once(path: str | os.PathLike[str]) -> None:
    """Record into this file until the process ends, unless that was asked for already. OSError: it cannot be."""
    text = os.fspath(path)
    if text in _ASKED:
        return
    with _CHANGING:
        absolute = Path(text).absolute()
        _begin(absolute)
        _ASKED[text] = absolute


def recording(path: str) -> contextlib.ExitStack:
    """Record into this file until the last one who asked for it closes what it got. OSError: it cannot be."""
    absolute = Path(path).absolute()
    with _CHANGING:
        _begin(absolute)
    leaving = contextlib.ExitStack()
    leaving.callback(_leave, absolute)
    return leaving


def _begin(absolute: Path) -> None:
    running = _RUNNING.get(absolute)
    if running is None:
        running = _RUNNING[absolute] = _Running(record(absolute))
    running.wanted += 1


def _leave(absolute: Path) -> None:
    with _CHANGING:
        running = _RUNNING[absolute]
        running.wanted -= 1
        if running.wanted == 0:
            del _RUNNING[absolute]
            running.recorder.stop()
