"""The Rust interpreter as a child process: builds it, feeds it programs, reads traces."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from language import Node, dump

TREE: Final = Path(__file__).resolve().parents[2]
RUNTIMES: Final = ("current", "multi", "local")
"""tokio's current_thread and multi_thread runtimes, and `spawn_local` on a LocalSet."""
FEATURES: Final = "axum,rayon,metrics,cuda,capi"
"""Those of `tested` in the Makefile: `cargo test` builds examples too, so nothing is left to build."""
INLINED: Final = {"CARGO_PROFILE_DEV_OPT_LEVEL": "2"}
"""As `inlined` there, for the same reason."""


def build(profile: str) -> Path:
    """Builds the interpreter and says where it is. RuntimeError with cargo's words if that fails."""
    command = ["cargo", "build", "--locked", "--example", "oracle", "--features", FEATURES]
    command += ["--profile", profile, "--message-format", "json"]
    done = subprocess.run(command, cwd=TREE, env=os.environ | INLINED, capture_output=True, text=True, check=False)
    if done.returncode:
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        errors = [m["message"]["rendered"] for m in messages if m["reason"] == "compiler-message"]
        raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(errors)}{done.stderr}")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "oracle":
            return Path(message["executable"])
    raise RuntimeError(f"{' '.join(command)} built no program")


class RustSide:
    """A running interpreter. It is started again where it crashed."""

    def __init__(self, interpreter: Path, runtimes: Sequence[str]) -> None:
        self.command = [str(interpreter), *runtimes]
        self.runtimes = tuple(runtimes)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, programs: Sequence[Node]) -> None:
        """Writes programs while somebody else reads the answers."""
        threading.Thread(target=self._write, args=(programs,), daemon=True).start()

    def _write(self, programs: Sequence[Node]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            for program in programs:
                self.process.stdin.write(dump(program) + "\n")
            self.process.stdin.flush()

    def answers(self, count: int) -> Iterator[dict[str, str]]:
        """The traces of the next programs, by runtime. They stop early where the interpreter crashed."""
        assert self.process.stdout is not None
        for _ in range(count):
            line = self.process.stdout.readline()
            if not line:
                break
            yield dict(zip(self.runtimes, line.split(), strict=True))
        else:
            return
        self.close()
        self.process = self._start()

    def migrations(self) -> tuple[int, int]:
        """How often a task suspended itself on the multi_thread runtime, and came back on another worker."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("migrations\n")
            self.process.stdin.flush()
        suspended, migrated = self.process.stdout.readline().split() or ("0", "0")  # it has crashed
        return int(suspended), int(migrated)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process.wait()
