"""The recording of a service, which its middlewares ask for: one for the process, until it ends."""

import os
from pathlib import Path
from typing import Final

from ctxalloc._native import Recorder, record

_RUNNING: Final[dict[Path, Recorder]] = {}
"""``_environment`` completes it at the interpreter's exit."""


def record_once(path: str | os.PathLike[str]) -> None:
    """Record into this file, unless another middleware asked for that already. OSError: it cannot be."""
    absolute = Path(path).absolute()
    if absolute not in _RUNNING:
        _RUNNING[absolute] = record(absolute)
