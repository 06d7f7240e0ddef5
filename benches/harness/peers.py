"""The peers: each a process of its own that does what it is told, so that preloaded allocators stand in the same run.

A `Peer` is (a process, what is selected in it). Processes wait for a line of JSON on stdin and answer with one; the
parent lets them work in turn, never two at a time.
"""

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

__all__ = ["NUMPY_ALLOCATOR", "PRELOADED", "REQUEST", "Peer", "Process", "found_preloads", "selection"]

PRELOADED: Final = {
    "jemalloc": ("libjemalloc.so.2", "libjemalloc2"),
    "mimalloc": ("libmimalloc.so.2", "libmimalloc2.0"),
}
"""Allocators that replace `malloc` by LD_PRELOAD: the library, and Debian's package of it."""
NUMPY_ALLOCATOR: Final = "numpy-allocator"
REQUEST: Final = "inside request()"
LIBC: Final = ctypes.CDLL(None)
"""Kept: numpy-allocator looks into ctypes' function objects at each call."""


@dataclass(frozen=True)
class Peer:
    """Who is measured: a name for the tables, what is preloaded, and which handler is selected."""

    name: str
    preload: str | None = None
    handler: str | None = None


def found_preloads() -> dict[str, str]:
    """Name to path of those that are installed; says what to install for the others."""
    found = {}
    for name, (library, package) in PRELOADED.items():
        places = [*Path("/usr/lib").glob(f"*/{library}"), *Path("/usr/lib").glob(library)]
        if places:
            found[name] = str(places[0])
        else:
            print(f"without {name}: install Debian's {package} to have it in the tables", file=sys.stderr)
    return found


class Process:
    """A Python that runs `script` with an allocator preloaded, or with none."""

    def __init__(self, script: str, preload: str | None) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        if preload is not None:
            environment["LD_PRELOAD"] = preload
        self.child = subprocess.Popen(
            [sys.executable, script, "--worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: dict[str, Any]) -> Any:
        """Sends a question and waits for its answer. RuntimeError: the process is gone."""
        stdin, stdout = self.child.stdin, self.child.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            msg = f"the worker ended with {self.child.wait()} over {question}"
            raise RuntimeError(msg)
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.child:
            self.child.terminate()

    @staticmethod
    def serve(answer: Any, stdin: IO[str] = sys.stdin) -> None:
        """The worker's side: answers each line of stdin."""
        for line in stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)


def selection(handler: str | None) -> contextlib.AbstractContextManager[object]:
    """The scope of a peer's handler: one of ours, a request's, numpy-allocator's over malloc, or NumPy's default."""
    if handler == NUMPY_ALLOCATOR:
        return _forwarding()
    import ctxalloc  # noqa: PLC0415 - not before it is wanted: the process may measure what stands without it

    return ctxalloc.request() if handler == REQUEST else ctxalloc.use(handler)


@functools.cache
def _forwarding() -> contextlib.AbstractContextManager[object]:
    """numpy-allocator's way to say malloc. Kept: its arrays are freed through the class."""
    import numpy_allocator  # noqa: PLC0415

    functions = {f"_{name}_": ctypes.addressof(getattr(LIBC, name)) for name in ("malloc", "calloc", "realloc", "free")}
    made: contextlib.AbstractContextManager[object] = numpy_allocator.type("forwarding", (), functions)
    return made
