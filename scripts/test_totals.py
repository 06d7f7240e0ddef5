"""Add up the closing lines of cargo test and pytest in a log, and print `N passed, N failed, N skipped`."""

import re
import sys
from collections import Counter
from pathlib import Path

# `test result: ok. 7 passed; 0 failed; 1 ignored; ...` and `== 12 passed, 1 skipped in 0.52s ==`
CLOSING = re.compile(r"^test result: .*|^=* ?\d+ .* in \d[\d.]*s\b.*", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|errors?|ignored|skipped)\b")
MEANS = {"error": "failed", "errors": "failed", "ignored": "skipped"}


def main() -> int:
    """Print the totals; 1 if there is nothing to add up."""
    totals: Counter[str] = Counter()
    for line in CLOSING.findall(Path(sys.argv[1]).read_text(errors="replace")):
        for count, word in COUNT.findall(line):
            totals[MEANS.get(word, word)] += int(count)
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    return 0 if totals["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
