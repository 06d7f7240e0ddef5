"""Draw docs/images/requests.png for the README: two tenants, each with a budget, in one process; one of them is greedy.

Every request runs in `ctxalloc.request()` with a limit of its own, under its tenant's budget. The picture shows those
accounts, read while the program ran. `python scripts/draw_requests.py` takes a few seconds.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ctxalloc
from ctxalloc import Budget, MiB

LIMIT_BYTES = 12 * MiB
TENANT_BYTES = 32 * MiB
SECONDS = 3.0
SEED = 7
COLOURS = {"blue": "#2f6f9f", "red": "#d0342c"}
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "requests.png"


@dataclass
class Outcome:
    """One request: when it ended, the peak of its account, and who refused it, if anybody did."""

    tenant: str
    end_s: float
    peak_bytes: int
    refused_by: str | None


async def work(size_bytes: int, dice: random.Random) -> None:
    """Load something, and work on it in several steps, each with an array of its own."""
    kept = []
    for _ in range(4):
        kept.append(np.ones(size_bytes // 4, np.uint8))
        await asyncio.sleep(dice.uniform(0.005, 0.03))


async def serve(tenant: Budget, size_bytes: int, dice: random.Random, began: float) -> Outcome:
    """Answer one request, as a service would."""
    request = ctxalloc.request(name="request", limit_bytes=LIMIT_BYTES, budget=tenant, root=True)
    refused_by = None
    try:
        async with request:
            await work(size_bytes, dice)
    except ctxalloc.BudgetExceeded as refusal:
        refused_by = refusal.budget
    return Outcome(tenant.name, time.perf_counter() - began, request.stats.peak_bytes, refused_by)


async def run() -> tuple[list[Outcome], list[tuple[float, int, int]], dict[str, Budget]]:
    """The requests, and what both tenants had in use over time."""
    dice = random.Random(SEED)
    tenants = {"blue": Budget(TENANT_BYTES, name="blue"), "red": Budget(TENANT_BYTES, name="red")}
    arrivals = [(dice.uniform(0, SECONDS), "blue", dice.randint(2, 8)) for _ in range(36)]
    arrivals += [(dice.uniform(SECONDS * 0.3, SECONDS * 0.7), "red", dice.randint(6, 16)) for _ in range(48)]
    arrivals.sort(reverse=True)
    began = time.perf_counter()
    tasks: list[asyncio.Task[Outcome]] = []
    seen = []
    while arrivals or not all(task.done() for task in tasks):
        now = time.perf_counter() - began
        while arrivals and arrivals[-1][0] <= now:
            _, tenant, mebibytes = arrivals.pop()
            tasks.append(asyncio.create_task(serve(tenants[tenant], mebibytes * MiB, dice, began)))
        seen.append((now, tenants["blue"].in_use_bytes, tenants["red"].in_use_bytes))
        await asyncio.sleep(0.002)
    return [task.result() for task in tasks], seen, tenants


def draw_tenants(
    axes: Axes, outcomes: list[Outcome], seen: list[tuple[float, int, int]], tenants: dict[str, Budget]
) -> None:
    """Bytes in use by each tenant over time; a cross for each request that its tenant's budget refused."""
    times = [row[0] for row in seen]
    for column, (name, tenant) in enumerate(tenants.items(), start=1):
        axes.step(times, [row[column] / MiB for row in seen], where="post", color=COLOURS[name], label=f"tenant {name}")
        refused = [outcome.end_s for outcome in outcomes if outcome.refused_by == name]
        assert tenant.limit_bytes is not None
        at = [tenant.limit_bytes / MiB + 1.5] * len(refused)
        axes.plot(refused, at, "x", color=COLOURS[name], label=f"refused by {name}'s budget ({len(refused)})")
    axes.axhline(TENANT_BYTES / MiB, color="#5f6b78", linestyle="--", linewidth=1)
    axes.text(
        SECONDS, TENANT_BYTES / MiB + 0.7, "limit of each tenant, 32 MiB", ha="right", fontsize=8.5, color="#5f6b78"
    )
    axes.set(xlabel="seconds", ylabel="MiB in use", title="Two tenants, one of them greedy", ylim=(0, 44))
    axes.legend(loc="upper left", frameon=False, ncols=2, fontsize=8.5)


def draw_requests(axes: Axes, outcomes: list[Outcome]) -> None:
    """The peak of each request, in the order in which they ended."""
    for position, outcome in enumerate(outcomes):
        refused = outcome.refused_by is not None
        colour = COLOURS[outcome.tenant]
        fill = "none" if refused else colour
        axes.bar(position, outcome.peak_bytes / MiB, width=0.8, facecolor=fill, edgecolor=colour, linewidth=0.8)
    axes.axhline(LIMIT_BYTES / MiB, color="#5f6b78", linestyle="--", linewidth=1)
    axes.text(0, LIMIT_BYTES / MiB + 0.3, "limit of each request, 12 MiB", va="bottom", fontsize=8.5, color="#5f6b78")
    counts = {name: sum(outcome.tenant == name for outcome in outcomes) for name in COLOURS}
    answered = {name: sum(o.tenant == name and o.refused_by is None for o in outcomes) for name in COLOURS}
    said = ", ".join(f"{name} {answered[name]} of {counts[name]} answered" for name in COLOURS)
    axes.set(xlabel=f"requests ({said});\nempty bars were refused", ylabel="MiB at the peak", ylim=(0, 15))
    axes.set(title="What each request's account says", xticks=[])


def main() -> None:
    """Run it and draw it."""
    outcomes, seen, tenants = asyncio.run(run())
    outcomes.sort(key=lambda outcome: outcome.end_s)
    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9.5, "axes.titleweight": "bold"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(12, 4), dpi=110, layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_tenants(left, outcomes, seen, tenants)
        draw_requests(right, outcomes)
        figure.savefig(PICTURE)
    print(f"{len(outcomes)} requests, {sum(o.refused_by is not None for o in outcomes)} refused; drawn: {PICTURE}")


if __name__ == "__main__":
    main()
