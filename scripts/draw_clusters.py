"""Draws docs/images/clusters.png: a few greedy tasks among others on two workers of Dask, without and with the plugin.

Run it in the clusters' environment: `PYTHONPATH=python .venv-clusters/bin/python scripts/draw_clusters.py`.
"""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "clusters"))

import proof  # noqa: E402 - the tests hold it to what is drawn here

from ctxalloc import MiB  # noqa: E402

TASKS = 600
GREEDY_EVERY = 600
TARGET = ROOT / "docs" / "images" / "clusters.png"


def panel(axes: plt.Axes, found: proof.Outcome, title: str) -> None:
    """Memory of both workers over time, and what became of the tasks."""
    for worker, colour in zip(sorted({sample.worker for sample in found.samples}), ("#2980b9", "#27ae60"), strict=True):
        own = [sample for sample in found.samples if sample.worker == worker]
        memory = [sample.memory_bytes / MiB for sample in own]
        axes.plot([sample.seconds for sample in own], memory, color=colour, label=f"worker {worker}")
        paused = [sample for sample in own if sample.status == "paused"]
        axes.scatter([one.seconds for one in paused], [one.memory_bytes / MiB for one in paused], s=9, color="#e67e22")
    limit = proof.MEMORY_LIMIT / MiB
    axes.axhline(limit, color="#7f8c8d", linewidth=0.8, linestyle="--")
    axes.text(0, limit, " memory limit of a worker", va="bottom", fontsize=8, color="#7f8c8d")
    ended = ", ".join(f"{count} {status}" for status, count in sorted(found.counted(greedy=True).items()))
    others = ", ".join(f"{count} {status}" for status, count in sorted(found.counted(greedy=False).items()))
    axes.set_title(
        f"{title}: workers killed {found.restarts} times, {found.seconds:.0f} s\n"
        f"greedy tasks: {ended};  others: {others}",
        fontsize=9,
        loc="left",
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB resident")
    axes.set_ylim(0, limit * 1.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper right", frameon=False)


def main() -> None:
    """Runs both, and draws."""
    runs = []
    for with_plugin, title in ((False, "without ctxalloc"), (True, "with RequestPlugin")):
        found = proof.run(with_plugin=with_plugin, tasks=TASKS, greedy_every=GREEDY_EVERY)
        print(title, found.restarts, found.seconds, found.counted(greedy=True), found.counted(greedy=False), flush=True)
        runs.append((found, title))
    figure, panels = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    for axes, (found, title) in zip(panels, runs, strict=True):
        panel(axes, found, title)
    figure.savefig(TARGET, dpi=110)


if __name__ == "__main__":
    main()
