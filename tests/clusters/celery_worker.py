"""A Celery worker of a test's own, whose broker is a folder, and what a client of it prints."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path


def lines_of_client(
    folder: Path, tasks: str, client: str, *, processes: int, environ: Mapping[str, str] | None = None
) -> list[str]:
    """Run ``client`` while a worker runs the app of ``tasks``, which finds ``FOLDER``, with ``environ`` of its own."""
    (folder / "tasks.py").write_text(f"FOLDER = {str(folder)!r}\n{tasks}")
    for name in ("queue", "results", "control"):
        (folder / name).mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-c", str(processes), "--loglevel", "ERROR"]
    with subprocess.Popen(command, cwd=folder, env={**environment, **(environ or {})}) as worker:
        try:
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(client)],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=150,
                check=True,
            )
        finally:
            worker.terminate()
    return done.stdout.splitlines()
