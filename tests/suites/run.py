"""Run the test suites of NumPy, SciPy and pandas in requests and under handlers, and compare with their default.

    run.py --suite numpy --way request --way limited          whole, as `make test-suites` does
    run.py --part --way limited                               a few minutes: what CI has
    run.py --suite numpy --package numpy.lib --way faulty:7   crashes only: each must be NumPy's own

Each (suite, way) is a pytest process with the plugin served.py. The suite runs as its authors run it too, in the same
run and on the same machine; only a test that passes there and fails in a way of ours counts, and only if it does so
again, alone, which it gets three times both ways. A process that crashes goes on after the test that crashed it.
README.md has more; outcomes and logs go to target/suites/.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOGS = Path(os.environ.get("SUITES_LOGS", HERE.parents[1] / "target" / "suites"))  # runs side by side want their own

# What of each package is run whole, and in the part that CI has, without what is marked as slow.
WHOLE = {
    "numpy": ("numpy",),
    "scipy": ("scipy.fft", "scipy.linalg", "scipy.ndimage", "scipy.interpolate", "scipy.sparse"),
    "pandas": ("pandas.tests.frame", "pandas.tests.reshape", "pandas.tests.groupby", "pandas.tests.io.parser"),
}
PART = {
    "numpy": ("numpy.lib", "numpy.linalg", "numpy.fft", "numpy.ma"),
    "scipy": ("scipy.fft",),
    "pandas": ("pandas.tests.reshape",),
}
# How often a test that fails in a way of ours and not by default is tried again, both ways.
TRIES = 3
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
# Seeds under which plain C must crash once, too, where a test crashed under `faulty:`.
PLAIN_SEEDS = 40
CRASHES_MAX = 60  # of one process: then something else is wrong


@dataclass
class Outcomes:
    """What one way made of a suite."""

    by_test: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    closed: bool = False  # the last process came to its end, and looked at the sums there
    ended_well: bool = True

    @classmethod
    def read(cls, path: Path) -> "Outcomes":
        outcomes = cls()
        for line in path.read_text().splitlines() if path.exists() else []:
            entry = json.loads(line)
            test, what = entry["test"], entry["what"]
            if what == "complaint":
                outcomes.complaints.append(entry["why"])
            elif what == "closed":
                outcomes.closed = True
            elif what == "began":
                outcomes.by_test[test] = "crashed"  # until it ends
            elif outcomes.by_test.get(test) != "failed":
                outcomes.by_test[test] = what
            if what == "failed":
                outcomes.reasons[test] = entry["why"]
        return outcomes

    def tests(self, outcome: str) -> list[str]:
        return [test for test, what in self.by_test.items() if what == outcome]

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(Counter(self.by_test.values()).items()))


def file_name(*parts: str) -> str:
    return "-".join(parts).replace(":", "_").replace("/", "_")


def pytest_once(way: str, stem: Path, *arguments: str) -> int:
    """One pytest process; returns its exit status."""
    environment = os.environ | {
        # The plugins, and meson and ninja: some tests compile an extension.
        "PYTHONPATH": os.pathsep.join(str(HERE.parent / name) for name in ("suites", "numpy_suite", "python")),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # NumPy's tests of very large arrays skip themselves above this; runs go side by side.
        "NPY_AVAILABLE_MEM": str(MEMORY // 16),
        "SCIPY_AVAILABLE_MEM": "1G",
        # The same order of sets and dicts, and of hypothesis' examples, in the runs that are compared.
        "PYTHONHASHSEED": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if way == "whole":
        made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
        environment |= {"LD_PRELOAD": made.stdout.strip(), "CTXALLOC_WHOLE": "1"}
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-c", str(HERE / "pytest.ini"), "-p", "served"]
    command += ["--served", way, "--outcomes", str(stem.with_suffix(".jsonl")), *arguments]
    folder = stem.with_suffix(".d")  # what tests leave in the current folder is theirs
    folder.mkdir(parents=True, exist_ok=True)
    with stem.with_suffix(".log").open("ab") as out:
        return subprocess.run(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode


def run_suite(suite: str, packages: tuple[str, ...], way: str, *, part: bool) -> Outcomes:
    """All tests of `packages`, served in that way; goes on after crashes."""
    stem = LOGS / file_name(suite, way)
    for ending in (".jsonl", ".log"):
        stem.with_suffix(ending).unlink(missing_ok=True)
    # Failures by the thousand, and nobody reads a traceback.
    brief = ["--tb=line"] if way.startswith("faulty:") else []
    # NumPy's slow tests have lists of 16 GB. Where they do not fit, the machine thrashes, or a kill looks like a crash.
    short = part or brief or suite == "pandas" or MEMORY < 64 << 30
    marks = [*brief, "-m", "not slow and not network and not db"] if short else []
    began = time.monotonic()
    for _ in range(CRASHES_MAX):
        status = pytest_once(way, stem, *marks, "--pyargs", *packages)
        if status >= 0:
            break
        print(f"{suite} {way}: ended by {signal.Signals(-status).name}, goes on", flush=True)
    outcomes = Outcomes.read(stem.with_suffix(".jsonl"))
    # 0: all passed, 1: some failed, 5: none was left. Others are pytest's own trouble, or more crashes than may be.
    outcomes.ended_well = status in {0, 1, 5} and outcomes.closed and len(outcomes.by_test) > 0
    print(f"{suite} {way}: {outcomes} in {time.monotonic() - began:.0f} s", flush=True)
    return outcomes


def again(test: str, way: str) -> str:
    """How a test ends that is run alone."""
    stem = LOGS / "again" / file_name(way, str(abs(hash(test))))
    stem.parent.mkdir(exist_ok=True)
    stem.with_suffix(".jsonl").unlink(missing_ok=True)
    pytest_once(way, stem, test)
    return Outcomes.read(stem.with_suffix(".jsonl")).by_test.get(test, "not run")


def newly_failing(default: Outcomes, other: Outcomes, way: str) -> list[str]:
    """What fails, or crashes, in this way only: in the suite's run, and again alone."""
    found = []
    for test, what in other.by_test.items():
        if what not in {"failed", "crashed"} or default.by_test.get(test) in {"failed", "crashed"}:
            continue
        ours = [again(test, way) for _ in range(TRIES)]
        theirs = [again(test, "default") for _ in range(TRIES)]
        is_repeated = any(outcome not in {"passed", "skipped"} for outcome in ours)
        print(f"{way}: {test} {what}; again alone: {ours}, by default {theirs}", flush=True)
        print("    " + other.reasons.get(test, "no reason").replace("\n", "\n    "), flush=True)
        if is_repeated and all(outcome in {"passed", "skipped"} for outcome in theirs):
            found.append(test)
    return found


def not_numpys(crashed: list[str]) -> list[str]:
    """The tests of these that no plain C handler crashes, whatever it refuses."""
    found = []
    for test in crashed:
        for seed in range(PLAIN_SEEDS):
            if again(test, f"plain:{seed}") == "crashed":
                print(f"NumPy's own crash: {test} (a plain C handler does it with seed {seed})", flush=True)
                break
        else:
            print(f"NOT SHOWN TO BE NUMPY'S: {test}", flush=True)
            found.append(test)
    return found


def main() -> int:
    """0 if nothing fails that does not fail by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=sorted(WHOLE), help="may be given again; all of them")
    parser.add_argument("--way", action="append", required=True, help="see served.py; may be given again")
    parser.add_argument("--package", action="append", help="instead of those of the suite; may be given again")
    parser.add_argument("--part", action="store_true", help="the packages that CI has, without what is marked as slow")
    options = parser.parse_args()
    if options.package and len(options.suite or ()) != 1:
        parser.error("--package needs one --suite")
    LOGS.mkdir(parents=True, exist_ok=True)

    chosen = PART if options.part else WHOLE
    suites = {suite: tuple(options.package or chosen[suite]) for suite in options.suite or sorted(WHOLE)}
    ways = ["default", *dict.fromkeys(options.way)]
    wrong: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {
            (suite, way): pool.submit(run_suite, suite, packages, way, part=options.part)
            for suite, packages in suites.items()
            for way in ways
        }
        done = {key: future.result() for key, future in running.items()}
    for suite, packages in suites.items():
        print(f"== {suite} {importlib.metadata.version(suite)}: {' '.join(packages)}")
        default = done[suite, "default"]
        for way in ways:
            outcomes = done[suite, way]
            wrong += [f"{suite} {way}: {complaint}" for complaint in outcomes.complaints]
            if not outcomes.ended_well:
                wrong.append(f"{suite} {way}: pytest did not end well, see {LOGS}")
            if way == "default":
                print(f"fail by default: {default.tests('failed') + default.tests('crashed')}")
            elif way.startswith("faulty:"):
                wrong += [f"{suite} {way}: crashed {test}" for test in not_numpys(outcomes.tests("crashed"))]
            else:
                if len(outcomes.by_test) != len(default.by_test):
                    wrong.append(f"{suite} {way}: {len(outcomes.by_test)} tests, {len(default.by_test)} by default")
                wrong += [f"{suite} {way}: {test}" for test in newly_failing(default, outcomes, way)]
    for line in wrong:
        print(f"WRONG: {line}")
    if not wrong:
        print(f"nothing fails in {', '.join(ways[1:])} that does not by default")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
