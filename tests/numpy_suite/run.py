"""Run NumPy's own test suite (`numpy._core`) with a ctxalloc handler selected for the whole of it.

One pytest process a handler, side by side, each with the plugin selected_handler.py; the logs go to
target/numpy_suite/. README.md beside this file says what is checked. `make test-numpy` calls it.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOGS = HERE.parents[1] / "target" / "numpy_suite"

PROGRESS_EVERY_SECONDS = 30


def start(handler: str, *, part: bool) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the suite under `handler`; returns the process and its log."""
    environment = os.environ | {
        # The plugin, and meson and ninja: some tests compile an extension.
        "PYTHONPATH": str(HERE),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # NumPy's tests of very large arrays skip themselves above this; runs go side by side.
        "NPY_AVAILABLE_MEM": str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 3),
    }
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini")]
    command += ["-p", "selected_handler", "--handler", handler, "--pyargs", "numpy._core"]
    if part:
        command += ["-m", "not slow"]
    log = LOGS / f"{handler}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=LOGS, env=environment, stdout=out, stderr=subprocess.STDOUT)
    return process, log


def progress(log: Path) -> str:
    """How far pytest says it is, e.g. `42%`."""
    marks = re.findall(rb"\[ *(\d+%)\]", log.read_bytes())
    return marks[-1].decode() if marks else "starting"


def closing(log: Path) -> str:
    """The part of the log worth reading: who served, what failed, pytest's last line."""
    text = log.read_text(errors="replace")
    start_of_end = text.find("=== handler ")
    end = text[text.rfind("\n", 0, start_of_end) + 1 :] if start_of_end >= 0 else text[-4000:]
    lines = [line for line in end.splitlines() if not line.startswith(("SKIPPED", "XFAIL"))]
    return "\n".join(lines)


def main() -> int:
    """Run the suite under every handler named; 0 if all are green and were served by their handler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handler", action="append", required=True, help="may be given again")
    parser.add_argument("--part", action="store_true", help="leave out what NumPy marks as slow")
    options = parser.parse_args()

    LOGS.mkdir(parents=True, exist_ok=True)
    waiting = list(dict.fromkeys(options.handler))
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    failed: list[str] = []
    said = time.monotonic()
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            handler = waiting.pop(0)
            running[handler] = start(handler, part=options.part)
        time.sleep(0.5)
        for handler, (process, log) in list(running.items()):
            if process.poll() is None:
                continue
            del running[handler]
            print(closing(log), flush=True)
            if process.returncode != 0:
                failed.append(handler)
                print(f"failed under {handler}: the whole log is {log}", flush=True)
        if time.monotonic() - said > PROGRESS_EVERY_SECONDS and running:
            said = time.monotonic()
            state = ", ".join(f"{handler} {progress(log)}" for handler, (_, log) in running.items())
            print(f"numpy._core under {state}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
