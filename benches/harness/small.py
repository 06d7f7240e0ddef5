"""The table of small blocks, from what `benches/small.rs` kept in target/bench: the worst shapes first.

`make bench-small` runs that bench, in a minute after its build, and prints the table. It runs it twice: once more with
jemalloc before `malloc`, in whose place it is then, so jemalloc's column has its multiples of mimalloc in that run.
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


def rows(name: str = "small-rust") -> dict[str, dict[str, float]]:
    """Shape, variant, median in nanoseconds. FileNotFoundError: the bench was not run."""
    shapes: dict[str, dict[str, float]] = {}
    for line in (OUT / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        shapes.setdefault(row["group"], {})[row["variant"]] = row["median_ns"]
    return shapes


def table() -> Iterator[str]:
    """The lines of a table in Markdown: each allocator's time as a multiple of mimalloc's, in nanoseconds a block."""
    shapes = sorted(rows().items(), key=lambda row: -row[1]["ContextAlloc in a request()"] / row[1][PEER])
    try:
        others = rows("small-jemalloc")
    except FileNotFoundError:
        others = {}
    yield "| shape | mimalloc | jemalloc | " + " | ".join(ABOVE.values()) + " |"
    yield "| --- | --- | --- |" + " --- |" * len(ABOVE)
    for shape, times in shapes:
        other = others.get(shape)
        jemalloc = f"{other['malloc, free'] / other[PEER]:.2f}x" if other else ""
        ratios = " | ".join(f"{times[variant] / times[PEER]:.2f}x" for variant in ABOVE)
        yield f"| {shape.replace('1 threads', '1 thread')} | {times[PEER]:.1f} ns | {jemalloc} | {ratios} |"


if __name__ == "__main__":
    print("\n".join(table()))
    print(f"\nload when this was printed, for {os.cpu_count()} processors: {os.getloadavg()[0]:.1f}")
