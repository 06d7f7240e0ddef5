"""The picture of a run: what went in and came out, whose memory the arrays lived in, how long requests took."""

import io
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from . import report
from .processing import Picture
from .reference import Wanted
from .report import Outcome

COLOURS: Final = ("#2f6f9f", "#e0a13a", "#4f9d69", "#8d6cab", "#b0623f", "#5f6b78")
WRONG: Final = "#d0342c"
INK: Final = "#22303c"
FAINT: Final = "#8a97a3"

SHOWN: Final[Mapping[str, str]] = {
    "/thumbnail": "camera.png",
    "/blur": "logo.png",
    "/sharpen": "coffee.png",
    "/edges": "astronaut.png",
    "/equalize": "rocket.jpg",
    "/denoise": "ihc.png",
    "/stats": "chelsea.png",
}
"""The picture that is shown for a route, if it was posted."""

STYLE: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.8,
}


def draw(path: Path, outcome: Outcome, control: Outcome | None, posted: Mapping[str, bytes], wanted: Wanted) -> None:
    """Write the picture to ``path`` (PNG). ``wanted`` has the answers that came back."""
    handlers = [*outcome.table.handlers.values(), outcome.table.scratch]
    colours = dict(zip(dict.fromkeys(handlers), itertools.cycle(COLOURS), strict=False))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(14, 9.4), dpi=110, facecolor="white")
        figure.text(0.012, 0.962, "One service, each route in memory of its own", fontsize=19, weight="bold")
        figure.text(0.012, 0.932, report.sentence(outcome), fontsize=9.5, color=FAINT)
        routes = outcome.table.handlers
        top = figure.add_gridspec(
            2, len(routes), top=0.865, bottom=0.49, left=0.03, right=0.99, wspace=0.05, hspace=0.04
        )
        for column, (route, handler) in enumerate(routes.items()):
            name = SHOWN[route] if SHOWN.get(route) in posted else next(iter(posted))
            before, after = (figure.add_subplot(top[row, column]) for row in (0, 1))
            before.set_title(f"{route}\n", fontsize=12, weight="bold")
            before.text(0.5, 1.03, handler, transform=before.transAxes, ha="center", color=colours[handler])
            side = _show(before, posted[name])
            answer = wanted[route, name]
            if answer.media_type == "image/png":
                _show(after, answer.content, side=side)
            else:
                _tell(after, answer.content)
            if column == 0:
                before.set_ylabel("posted", color=FAINT)
                after.set_ylabel("answered", color=FAINT)
        widths = (1, 1, 1.15) if control else (1.2, 1)
        below = figure.add_gridspec(
            1, len(widths), top=0.405, bottom=0.075, left=0.08, right=0.99, wspace=0.09, width_ratios=widths
        )
        panels = [figure.add_subplot(below[0, column]) for column in range(len(widths))]
        _shares(panels[0], outcome, colours)
        panels[0].set_title("Whose memory each array was found in", loc="left", weight="bold")
        if control:
            _shares(panels[1], control, colours)
            panels[1].set_title("Control: one stack for the process", loc="left", weight="bold")
        _latencies(panels[-1], outcome, colours)
        for panel in panels[1:]:
            panel.tick_params(labelleft=False)
        keys = [Patch(color=colour, label=name) for name, colour in colours.items()]
        keys.append(Patch(facecolor="white", edgecolor=WRONG, hatch="////", label="another handler than asked for"))
        figure.legend(handles=keys, loc="lower left", bbox_to_anchor=(0.075, 0.0), ncols=len(keys), frameon=False)
        figure.savefig(path, pil_kwargs={"optimize": True})


def _show(axes: Axes, content: bytes, *, side: float | None = None) -> float:
    """A picture in a square frame of ``side`` pixels, or of its own longer side, which is given back."""
    with Image.open(io.BytesIO(content)) as image:
        rgba = image.convert("RGBA")
        pixels: Picture = np.asarray(Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba))
    height, width = pixels.shape[:2]
    side = side or max(height, width)
    axes.imshow(pixels, interpolation="antialiased")
    axes.set_xlim((width - side) / 2, (width + side) / 2)
    axes.set_ylim((height + side) / 2, (height - side) / 2)
    _bare(axes)
    return side


def _tell(axes: Axes, content: bytes) -> None:
    """A JSON answer, as far as it has room."""
    answer = json.loads(content)
    lines = [f"{answer['width']} x {answer['height']}", ""]
    for channel in ("red", "green", "blue"):
        numbers = answer[channel]
        lines.append(f"{channel:6}{numbers['mean']:6.1f} +-{numbers['deviation']:5.1f}")
        lines.append(f"{'':6}{numbers['entropy_bits']:6.2f} bits")
    axes.text(0.5, 0.5, "\n".join(lines), family="DejaVu Sans Mono", fontsize=7.5, ha="center", va="center")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_box_aspect(1)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _shares(axes: Axes, outcome: Outcome, colours: Mapping[str, str]) -> None:
    """A bar a route: its arrays by the handler they were found in, the wrong ones hatched."""
    for row, (route, handler) in enumerate(outcome.table.handlers.items()):
        counts = {seen: n for seen, n in outcome.audit.counts.items() if seen.route == route}
        total = sum(counts.values())
        parts: Counter[tuple[bool, str]] = Counter()
        for seen, count in counts.items():
            parts[seen.wrong, seen.found] += count
        left = 0.0
        for (wrong, name), count in sorted(parts.items(), key=lambda part: (part[0][0], part[0][1] != handler)):
            colour, share = colours.get(name, FAINT), 100 * count / total
            look: dict[str, Any] = (
                {"facecolor": "white", "edgecolor": WRONG, "hatch": "////"} if wrong else {"color": colour}
            )
            axes.barh(row, share, left=left, height=0.62, **look)
            left += share
        errors = sum(count for (wrong, _), count in parts.items() if wrong)
        axes.text(
            101.5, row, f"{errors:,} of {total:,} wrong", va="center", fontsize=8.5, color=WRONG if errors else FAINT
        )
    axes.set_xlim(0, 136)
    axes.set_xticks([0, 50, 100], ["0", "50", "100 %"])
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 100)
    axes.tick_params(left=False)
    _name_rows(axes, tuple(outcome.table.handlers))


def _latencies(axes: Axes, outcome: Outcome, colours: Mapping[str, str]) -> None:
    """A dot a request, and the median."""
    scatter = np.random.default_rng(0)
    longest = 0.0
    for row, (route, handler) in enumerate(outcome.table.handlers.items()):
        values = outcome.latencies_ms(route)
        median, late = np.percentile(values, (50, 95))
        longest = max(longest, *values)
        heights = row + scatter.uniform(-0.24, 0.24, len(values))
        axes.plot(values, heights, ".", color=colours[handler], alpha=0.55, markersize=5, markeredgewidth=0)
        axes.plot([median, median], [row - 0.36, row + 0.36], color=INK, linewidth=2)
        axes.plot([late, late], [row - 0.2, row + 0.2], color=INK, linewidth=1)
    axes.set_xlim(0, longest * 1.03)
    axes.set_title("Latency in ms (lines: median, 95 %)", loc="left", weight="bold")
    axes.grid(axis="x", color="#e6eaee")
    axes.set_axisbelow(True)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    _name_rows(axes, tuple(outcome.table.handlers))


def _name_rows(axes: Axes, routes: Sequence[str]) -> None:
    axes.set_yticks(range(len(routes)), routes)
    axes.set_ylim(len(routes) - 0.45, -0.55)
