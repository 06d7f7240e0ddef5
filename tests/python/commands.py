"""``ctxalloc``'s commands in this process, those that run no program in it: the start of a new one takes longer."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

from ctxalloc import _command


class Done(NamedTuple):
    """What a command left behind, by the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def ctxalloc(*words: str | Path) -> Done:
    """Runs a command: its exit status, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = _command.main([*map(str, words)])
        except SystemExit as end:  # argparse's
            status = int(end.code or 0)
    return Done(status, out.getvalue(), err.getvalue())
