"""What a run of the demo found, and the table that is printed of it. Neighbours: ``figure`` draws the same."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .audit import Audit, Place, Seen
from .client import Sample
from .routes import Table

PLACES: tuple[Place, ...] = ("thread", "rust", "coroutine")


@dataclass(frozen=True)
class Outcome:
    """One run against one service."""

    table: Table
    samples: Sequence[Sample]
    audit: Audit
    clients: int
    seconds: float

    @property
    def failures(self) -> list[Sample]:
        """Requests without an answer, or with a wrong one."""
        return [sample for sample in self.samples if sample.failure is not None]

    def latencies_ms(self, route: str) -> list[float]:
        """Of the requests to a route, in the order they were answered."""
        return [1000 * sample.latency_s for sample in self.samples if sample.job.route == route]

    def seen(self, route: str, asked: str) -> Counter[Seen]:
        """What was counted for one route and one handler."""
        return Counter({s: n for s, n in self.audit.counts.items() if s.route == route and s.asked == asked})


def found(seen: Counter[Seen]) -> Counter[str]:
    """Arrays by the handler that made them."""
    counts: Counter[str] = Counter()
    for one, count in seen.items():
        counts[one.found] += count
    return counts


def text(outcome: Outcome) -> str:
    """The table, a line for each route and each handler asked for in it, and a line of totals."""
    header = ("route", "handler asked for", "found on arrays", *PLACES, "mismatches")
    header = (*header, "requests", "p50 ms", "p95 ms")
    rows = [header, *_rows(outcome)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(_cell(*cell) for cell in zip(range(len(header)), row, widths, strict=True)) for row in rows]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:-1]), rule, lines[-1].rstrip()])


def sentence(outcome: Outcome) -> str:
    """How much of it there was."""
    count, audit = len(outcome.samples), outcome.audit
    return (
        f"{count} requests by {outcome.clients} clients at once in {outcome.seconds:.1f} s "
        f"({count / outcome.seconds:.0f} a second), {count - len(outcome.failures)} answers as under NumPy's default "
        f"handler; {audit.arrays:,} arrays, {audit.interleaved:,} of them between those of requests with other handlers"
    )


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    for route, handler in outcome.table.handlers.items():
        latencies = outcome.latencies_ms(route)
        numbers = (str(len(latencies)), *(f"{np.percentile(latencies, q):.0f}" for q in (50, 95) if latencies))
        yield _row(outcome, route, route, handler, numbers)
        scratch = outcome.table.scratch
        if scratch != handler and outcome.seen(route, scratch):
            yield _row(outcome, "  its scratch", route, scratch, ())
    places = [sum(n for seen, n in outcome.audit.counts.items() if seen.place == place) for place in PLACES]
    total = (f"{outcome.audit.arrays} arrays", *map(str, places), str(outcome.audit.mismatches))
    yield ("all", "", *total, str(len(outcome.samples)), "", "")


def _row(outcome: Outcome, label: str, route: str, asked: str, numbers: tuple[str, ...]) -> tuple[str, ...]:
    seen = outcome.seen(route, asked)
    names = ", ".join(f"{count} {name}" for name, count in found(seen).most_common())
    places = (str(sum(n for one, n in seen.items() if one.place == place) or "") for place in PLACES)
    wrong = sum(n for one, n in seen.items() if one.wrong)
    return (label, asked, names, *places, str(wrong), *numbers, *[""] * (3 - len(numbers)))


def _cell(column: int, content: str, width: int) -> str:
    return content.ljust(width) if column < 3 else content.rjust(width)
