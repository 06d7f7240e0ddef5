"""The table of small blocks, from what `benches/small.rs` kept in target/bench: the worst shapes first.

`make bench-small` runs that bench, in a minute after its build, and prints the table.
"""

import json
import os
from collections.abc import Iterator
from typing import Final

from harness import OUT

PEER: Final = "mimalloc"
ABOVE: Final = {
    "malloc, free": "`malloc`",
    "Pool": "`Pool`",
    "ContextAlloc in `system`": "in `system`",
    "ContextAlloc in `pool`": "in `pool`",
    "ContextAlloc in a request()": "in a `request()`",
    "with a limit and a budget": "limit and budget",
}
"""The columns by the bench's names of its variants."""


def rows() -> dict[str, dict[str, float]]:
    """Shape, variant, median in nanoseconds. FileNotFoundError: the bench was not run."""
    shapes: dict[str, dict[str, float]] = {}
    for line in (OUT / "small-rust.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        shapes.setdefault(row["group"], {})[row["variant"]] = row["median_ns"]
    return shapes


def table() -> Iterator[str]:
    """The lines of a table in Markdown: each allocator's time as a multiple of mimalloc's, in nanoseconds a block."""
    shapes = sorted(rows().items(), key=lambda row: -row[1]["ContextAlloc in a request()"] / row[1][PEER])
    yield "| shape | mimalloc | " + " | ".join(ABOVE.values()) + " |"
    yield "| --- | --- |" + " --- |" * len(ABOVE)
    for shape, times in shapes:
        ratios = " | ".join(f"{times[variant] / times[PEER]:.2f}x" for variant in ABOVE)
        yield f"| {shape.replace('1 threads', '1 thread')} | {times[PEER]:.1f} ns | {ratios} |"


if __name__ == "__main__":
    print("\n".join(table()))
    print(f"\nload when this was printed, for {os.cpu_count()} processors: {os.getloadavg()[0]:.1f}")
