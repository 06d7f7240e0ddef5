"""Print what failed in the log of a step of CI, in few short lines: only the end of CI's output is kept.

Understands cargo test, pytest, the sanitizers and compilers.
"""

import re
import sys
from pathlib import Path

MAX_LINES = 5
MAX_LENGTH = 130

# A failed test of Rust: its output, in which the first panic is the reason.
#   ---- path::name stdout ----
#   thread 'path::name' (123) panicked at tests/file.rs:1:2:
#   what is wrong
RUST = re.compile(
    r"^---- (?P<name>[^\n]+) stdout ----$(?P<output>.*?)(?=^---- |^failures:$|\Z)", re.MULTILINE | re.DOTALL
)
PANIC = re.compile(r"panicked at (?P<place>\S+?):\n(?P<reason>.*)")
OTHERS = re.compile(
    r"^(?:FAILED |ERROR |SUMMARY: |error(?:\[E\d+\])?: (?!\d+ target)|.*process didn't exit successfully).*",
    re.MULTILINE,
)


def failures(log: str) -> list[str]:
    """What failed, one line each, without repetitions."""
    found = []
    for test in RUST.finditer(log):
        panic = PANIC.search(test["output"])
        found.append(f"{test['name']}: {panic['place']}: {panic['reason']}" if panic else test["name"])
    found += OTHERS.findall(log)
    return list(dict.fromkeys(line[:MAX_LENGTH] for line in found))


def main() -> None:
    """Print them; a number stands for those that are too many."""
    found = failures(Path(sys.argv[1]).read_text(errors="replace"))
    for line in found[:MAX_LINES]:
        print(f"   {line}")
    if len(found) > MAX_LINES:
        print(f"   and {len(found) - MAX_LINES} more")


if __name__ == "__main__":
    main()
