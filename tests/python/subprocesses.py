"""Python run anew: for what a test process cannot do to itself (exit, fork, another environment)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PATH = os.pathsep.join([str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])])


class Outcome(NamedTuple):
    """What a Python process left behind."""

    code: int
    out: str
    err: str


def run(program: str, *options: str, timeout_seconds: float = 300, **environment: str) -> Outcome:
    """Run a program text; `options` are the interpreter's. Warnings are errors there too.

    The program can import the modules beside this one.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", *options, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,  # it hangs
        env={**os.environ, "RUST_BACKTRACE": "0", "PYTHONPATH": PATH, **environment},
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def says(program: str, *options: str, timeout_seconds: float = 300, **environment: str) -> str:
    """What a program prints; it must end well and complain of nothing."""
    outcome = run(program, *options, timeout_seconds=timeout_seconds, **environment)
    assert outcome == (0, outcome.out, ""), outcome
    return outcome.out.strip()
