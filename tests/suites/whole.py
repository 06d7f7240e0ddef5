"""Run CPython's own tests with everything counted, and compare with a run without.

    whole.py                     as `make test-suites-whole` does
    whole.py test_json           one module of CPython's
    whole.py --in FILE MODULE    what it starts: the tests of one module, their outcomes to a file

With everything counted means: the library is before malloc, the module's tests run in one whole request, and each of
them in another one inside. A test that passes without and not with it runs again three times both ways; it counts if it
fails with it each time, and never without. So does a process that dies. NumPy's tests are run.py's: `--way whole`.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import subprocess
import sys
import time
import unittest
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOGS = Path(os.environ.get("SUITES_LOGS", HERE.parents[1] / "target" / "suites")) / "whole"
CPYTHON = (
    "test_json",
    "test_sqlite3",
    "test_pickle",
    "test_threading",
    "test_asyncio",
    "test_subprocess",
    "test_re",
    "test_zlib",
    "test_ctypes",
    "test_gc",
    "test_fork1",
    "test_tracemalloc",
    "test_capi",
    "test_exceptions",
    "test_io",
    "test_sys",
    "test_list",
    "test_bytes",
    "test_array",
    "test_bz2",
    "test_lzma",
    "test_xml_etree_c",
    "test_thread",
    "test_context",
    "test_coroutines",
    "test_generators",
    # Where this Python has them: an installation may leave some of its tests out.
    "test_concurrent_futures",
    "test_multiprocessing_fork",
)
TRIES = 3
SECONDS = 1800


class Outcomes(unittest.TextTestResult):
    """Notes how each test ends; with `whole`, each is in a request of its own."""

    whole = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.by_test: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's
        super().startTest(test)
        self.by_test[test.id()] = "passed"
        if self.whole:
            import ctxalloc

            self.request = ctxalloc.request(whole=True)
            self.request.__enter__()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's
        if self.whole:
            self.request.__exit__(None, None, None)
        super().stopTest(test)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802 - unittest's
        self.by_test[test.id()] = "failed"
        super().addError(test, err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802 - unittest's
        self.by_test[test.id()] = "failed"
        super().addFailure(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802 - unittest's
        if err is not None:
            self.by_test[test.id()] = "failed"
        super().addSubTest(test, subtest, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 - unittest's
        self.by_test[test.id()] = "skipped"
        super().addSkip(test, reason)


def run_here(module: str, path: Path, only: list[str]) -> None:
    """The tests of one module in this process."""
    from test import support
    from test.support import os_helper

    support.use_resources = []  # as `python -m test`: no network, nothing that is slow by its authors' word
    support.verbose = 0
    Outcomes.whole = os.environ.get("CTXALLOC_WHOLE") == "1"
    around: Any = nullcontext()
    if Outcomes.whole:
        import ctxalloc

        around = ctxalloc.request(whole=True, name=module)
    with os_helper.temp_cwd(f"ctxalloc-{os.getpid()}"), around as request:
        names = only or [f"test.{module}"]
        tests = unittest.defaultTestLoader.loadTestsFromNames(names)
        result = unittest.TextTestRunner(resultclass=Outcomes, verbosity=1).run(tests)
    assert isinstance(result, Outcomes)
    told: dict[str, Any] = {"tests": result.by_test}
    if request is not None:
        told["peak_bytes"] = request.stats.peak_bytes
    path.write_text(json.dumps(told))


def environment(*, whole: bool) -> dict[str, str]:
    if not whole:
        return dict(os.environ)
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return {**os.environ, "LD_PRELOAD": made.stdout.strip(), "CTXALLOC_WHOLE": "1"}


def run(module: str, *, whole: bool, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """The outcomes of a module's tests, in a process of its own."""
    stem = LOGS / f"{module}-{'whole' if whole else 'default'}{'-again' if only else ''}"
    outcomes = stem.with_suffix(".json")
    outcomes.unlink(missing_ok=True)
    command = [sys.executable, "-X", "faulthandler", __file__, "--in", str(outcomes), module, *only]
    began = time.monotonic()
    with stem.with_suffix(".log").open("ab" if only else "wb") as out:
        status = subprocess.run(
            command,
            cwd=LOGS,
            env=environment(whole=whole),
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        ).returncode
    if not outcomes.exists():
        return {"tests": {}, "died": status}
    found: dict[str, Any] = json.loads(outcomes.read_text())
    if not only:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(Counter(found["tests"].values()).items()))
        how = f"whole, {found['peak_bytes'] >> 20} MiB at the peak" if whole else "default"
        print(f"{module}, {how}: {counts} in {time.monotonic() - began:.0f} s", flush=True)
    return found


def is_here(module: str) -> bool:
    """Whether this Python has the module: a test that cannot be imported would be one that fails both ways."""
    return importlib.util.find_spec(f"test.{module}") is not None


def wrong_of(module: str) -> list[str]:
    """What of a module's tests fails with everything counted, and only then."""
    if not is_here(module):
        print(f"{module}: this Python does not have it", flush=True)
        return []
    default, whole = run(module, whole=False), run(module, whole=True)
    if "died" in whole or "died" in default:
        return [f"{module}: ended by status {whole.get('died', 0)}, by default {default.get('died', 0)}; see {LOGS}"]
    found = [] if "passed" in default["tests"].values() else [f"{module}: no test passes by default; see {LOGS}"]
    if len(whole["tests"]) != len(default["tests"]):
        found.append(f"{module}: {len(whole['tests'])} tests, {len(default['tests'])} by default")
    for test, what in whole["tests"].items():
        if what != "failed" or default["tests"].get(test) == "failed":
            continue
        runs = [
            [run(module, whole=one, only=(test,))["tests"].get(test) for _ in range(TRIES)] for one in (True, False)
        ]
        print(f"{module}: {test} failed; again alone: {runs[0]}, by default {runs[1]}", flush=True)
        if all(one != "passed" for one in runs[0]) and all(one == "passed" for one in runs[1]):
            found.append(f"{module}: {test}")
    return found


def main() -> int:
    """0 if nothing fails that does not fail by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", dest="path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("module", nargs="*", help="of CPython's; all that are listed here")
    options = parser.parse_args()
    if options.path is not None:
        run_here(options.module[0], options.path, options.module[1:])
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    modules = options.module or CPYTHON
    wrong: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(wrong_of, modules):
            wrong += found
    for line in wrong:
        print(f"WRONG: {line}")
    if not wrong:
        print("nothing fails with everything counted that does not without")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
