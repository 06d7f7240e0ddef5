"""The picture of the demo: memory over time without and with the middleware, and who was served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from ctxalloc import MiB

from .app import SERVICE

if TYPE_CHECKING:
    from .demo import Run

COLOURS: Final = {"bare": "#d0342c", "guarded": "#2f6f9f"}
NAMES: Final = {"bare": "without", "guarded": "with the middleware"}


def draw(path: Path, runs: list[Run]) -> None:
    """Write the picture to ``path`` (PNG)."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=(12, 4.6), dpi=110, layout="constrained")
        memory, served = figure.subplots(1, 2, width_ratios=[2, 1])
        for run in runs:
            memory.plot(*zip(*run.memory, strict=True), color=COLOURS[run.name], label=NAMES[run.name])
            memory.axvline(run.load_s, color=COLOURS[run.name], linewidth=0.6, linestyle=":")
        before = runs[-1].memory[0][1]
        limit = (SERVICE.limit_bytes or 0) / MiB
        memory.axhline(before + limit, color="#5f6b78", linewidth=0.8, linestyle="--")
        memory.text(0, before + limit, f"the service's budget, {limit:.0f} MiB", va="bottom", color="#5f6b78")
        memory.set(title="Memory of the process", xlabel="seconds; dotted: the load ends", ylabel="MiB", ylim=(0, None))
        memory.legend(frameon=False, loc="center right")
        labels = [f"{tenant}\n{NAMES[run.name].partition(' the')[0]}" for run in runs for tenant in run.statuses]
        ok = [run.statuses[tenant][200] for run in runs for tenant in run.statuses]
        refused = [run.statuses[tenant][503] for run in runs for tenant in run.statuses]
        served.bar(labels, ok, color="#4f9d69", label="served")
        served.bar(labels, refused, bottom=ok, color="#e0a13a", label="refused, 503")
        served.set_title("Answers")
        served.tick_params(axis="x", labelsize=8)
        served.legend(frameon=False)
        figure.savefig(path)
