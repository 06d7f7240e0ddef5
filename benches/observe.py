"""What seeing costs: a request that is counted under a name, a profile, a snapshot, a scrape; `ctxalloc run` alone.

Every variant runs in turn, round after round; medians are compared. What `ctxalloc run` adds is measured in processes
of their own, which run the same loop by `python` and by `ctxalloc run`, in turn (aim: nothing, within the noise).
Counting itself is in Rust's bench: the rows of benches/requests.rs with a name and without. Numbers go to
target/bench/observe.json. Options: --rounds N, --quick.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, keep, loop, medians, rounds_asked, row_of, table

import ctxalloc
from ctxalloc import _profile, metrics
from ctxalloc._page import numbers

AIM_RUN = 1.05

SCRIPT = """\
import time
import numpy as np
def run(n):
    empty = np.empty
    begun = time.perf_counter()
    for _ in range(n):
        empty(1000)
    return (time.perf_counter() - begun) / n * 1e9
run(1000)
print(min(run(100_000) for _ in range(5)))
"""


def requests(rounds: int) -> dict[str, Row]:
    """A request in Python, by its name."""
    names: dict[str, Any] = {"request": ctxalloc.request}
    variants = {
        "request()": loop("with request():\n    pass", **names),
        "request(name=...)": loop("with request(name='/route/{id}'):\n    pass", **names),
    }
    rows = medians(variants, rounds, 2000)
    table("a request with nothing in it", rows, "request()")
    return rows


def profile(rounds: int) -> dict[str, Row]:
    """An array, with a profile and without."""
    plain = loop("empty(1000)", empty=np.empty)

    def profiled(count: int) -> float:
        with _profile.profiled():
            return plain(count)

    rows = medians({"numpy.empty(1000)": plain, "the same, in a profile (--report)": profiled}, rounds, 2000)
    table("an array of 8 kB", rows, "numpy.empty(1000)")
    return rows


def reading(rounds: int) -> dict[str, Row]:
    """Who reads: with 128 names."""
    for number in range(128):
        with ctxalloc.request(name=f"route {number}"):
            np.empty(100)
    variants = {
        "metrics.snapshot(), 128 names": loop("snapshot()", snapshot=metrics.snapshot),
        "coverage()": loop("coverage()", coverage=ctxalloc.coverage),
        "the page's numbers": loop("numbers()", numbers=numbers),
    }
    rows = medians(variants, max(3, rounds // 4), 10)
    table("reading", rows, "metrics.snapshot(), 128 names")
    return rows


def run_alone(rounds: int) -> dict[str, Row]:
    """The same loop by ``python`` and by ``ctxalloc run``."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT, encoding="utf-8")
        commands = {
            "python": [sys.executable, str(script)],
            "ctxalloc run": [sys.executable, "-m", "ctxalloc", "run", str(script)],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                times[name].append(float(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
    rows = {name: row_of(all_times) for name, all_times in times.items()}
    table("an array of 8 kB, in processes of their own", rows, "python")
    ratio = statistics.median(times["ctxalloc run"]) / statistics.median(times["python"])
    print(f"`ctxalloc run` without --report: {ratio:.2f}x (aim: {AIM_RUN}x)")
    return rows


def main() -> None:
    """Measures, prints and keeps."""
    rounds = rounds_asked(__doc__)
    found = {"requests": requests(rounds), "profile": profile(rounds), "reading": reading(rounds)}
    keep("observe", {"rounds": rounds, **found, "run": run_alone(max(5, rounds // 4))})


if __name__ == "__main__":
    main()
