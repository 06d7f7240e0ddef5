"""The picture of a demo: memory over time on a service of two kinds, and who was served by each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

from .load import Run

COLOURS: Final = ("#d0342c", "#2f6f9f")


def draw(
    path: Path, runs: list[Run], names: Mapping[str, tuple[str, str]], refusals: frozenset[int], limit_mib: float
) -> None:
    """Write the picture to ``path`` (PNG). ``names`` has each run's name for the legend, and a short one."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=(12, 4.6), dpi=110, layout="constrained")
        memory, served = figure.subplots(1, 2, width_ratios=[2, 1])
        for run, colour in zip(runs, COLOURS[-len(runs) :], strict=True):
            memory.plot(*zip(*run.memory, strict=True), color=colour, label=names[run.name][0])
            memory.axvline(run.load_s, color=colour, linewidth=0.6, linestyle=":")
        level = runs[-1].memory[0][1] + limit_mib
        memory.axhline(level, color="#5f6b78", linewidth=0.8, linestyle="--")
        memory.text(0, level, f"the service's budget, {limit_mib:.0f} MiB", va="bottom", color="#5f6b78")
        memory.set(title="Memory of the process", xlabel="seconds; dotted: the load ends", ylabel="MiB", ylim=(0, None))
        memory.legend(frameon=False)
        labels = [f"{tenant}\n{names[run.name][1]}" for run in runs for tenant in run.statuses]
        ok = [run.statuses[tenant][200] for run in runs for tenant in run.statuses]
        no = [run.refused(refusals, tenant) for run in runs for tenant in run.statuses]
        served.bar(labels, ok, color="#4f9d69", label="served")
        served.bar(labels, no, bottom=ok, color="#e0a13a", label=f"refused, {' or '.join(map(str, sorted(refusals)))}")
        served.set_title("Answers")
        served.tick_params(axis="x", labelsize=8)
        served.set_ylim(top=1.25 * max(map(sum, zip(ok, no, strict=True))))
        served.legend(frameon=False)
        figure.savefig(path)
