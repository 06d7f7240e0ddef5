"""Draws docs/images/clusters.png: greedy tasks among thousands on two workers of Dask, without and with the plugin.

`make clusters-picture` runs it, in the clusters' environment.
"""

import itertools
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "clusters"))

import proof  # noqa: E402 - the tests hold it to what is drawn here

from ctxalloc import MiB  # noqa: E402

TASKS = 3000
GREEDY_EVERY = 750
COLOURS = ("#2f6f9f", "#3a8f5c")
RED = "#d0342c"
GREY = "#5f6b78"
PICTURE = ROOT / "docs" / "images" / "clusters.png"


def lines(samples: list[proof.Sample]) -> tuple[list[float], list[float]]:
    """Memory over time, with a gap where one process of the worker ended and the next one began."""
    seconds, memory = [], []
    before = None
    for sample in samples:
        if before is not None and sample.pid != before.pid:
            seconds.append(sample.seconds)
            memory.append(float("nan"))
        if sample.memory_bytes:  # 0: it has ended, and nobody has waited for it yet
            seconds.append(sample.seconds)
            memory.append(sample.memory_bytes / MiB)
        before = sample
    return seconds, memory


def draw(axes: Axes, found: proof.Outcome, title: str) -> None:
    """Memory of both workers over time, and what became of the tasks."""
    limit = proof.MEMORY_LIMIT / MiB
    killed: list[float] = []
    for worker, colour in zip(sorted({sample.worker for sample in found.samples}), COLOURS, strict=True):
        own = [sample for sample in found.samples if sample.worker == worker]
        axes.plot(*lines(own), color=colour, linewidth=1, label=f"worker {worker}")
        killed += [one.seconds for one, after in itertools.pairwise(own) if one.pid != after.pid]
    axes.plot(killed, [limit * 1.07] * len(killed), "x", color=RED, label=f"killed ({len(killed)})")
    axes.axhline(limit, color=GREY, linewidth=1, linestyle="--")
    axes.axvline(found.seconds, color=GREY, linewidth=0.8, linestyle=":")
    is_whole = not {"pending", "lost"} & set(found.statuses)
    end = "all done:" if is_whole else "given up:"
    axes.text(found.seconds, limit * 0.4, f" {end}\n {found.seconds:.0f} s", va="center", fontsize=8.5, color=GREY)
    ended = ", ".join(f"{count} {status}" for status, count in sorted(found.counted(greedy=True).items()))
    others = ", ".join(f"{count} {status}" for status, count in sorted(found.counted(greedy=False).items()))
    axes.set_title(title, loc="left")
    axes.text(1, 1.02, f"greedy: {ended}; others: {others}", transform=axes.transAxes, ha="right", fontsize=8.5)
    axes.set(ylabel="MiB resident", ylim=(0, limit * 1.18))
    axes.legend(loc=(0.55, 0.62), frameon=False, ncols=3, fontsize=8.5)


def main() -> None:
    """Runs both, and draws."""
    runs = {
        title: proof.run(with_plugin=with_plugin, tasks=TASKS, greedy_every=GREEDY_EVERY)
        for title, with_plugin in (("Without ctxalloc", False), ("With RequestPlugin", True))
    }
    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9.5, "axes.titleweight": "bold"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 4.6), dpi=100, layout="constrained")
        panels = figure.subplots(2, 1, sharex=True)
        for axes, (title, found) in zip(panels, runs.items(), strict=True):
            draw(axes, found, title)
        at = proof.MEMORY_LIMIT / MiB * 0.97
        panels[0].text(0, at, " memory limit of a worker", va="top", fontsize=8.5, color=GREY)
        panels[1].set(xlabel="seconds", xlim=(0, 1.12 * max(found.seconds for found in runs.values())))
        figure.savefig(PICTURE)
    for title, found in runs.items():
        print(f"{title}: {proof.text(found)}")
    print(f"drawn: {PICTURE}")


if __name__ == "__main__":
    main()
