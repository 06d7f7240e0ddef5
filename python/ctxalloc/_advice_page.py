"""The page of ``ctxalloc recommend --output``: one HTML file that needs nothing else, of what ``_recommend`` tells."""

import html
import statistics
from typing import Any, Final

from ctxalloc import _at_once
from ctxalloc._text import counted, printable, size_text

_WIDTH: Final = 420
_BAR: Final = 16

_PAGE: Final = """\
<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<meta name=viewport content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; --line: #8884; --bar: #4a7fc1 }}
body {{ margin: 1.5rem auto; max-width: 1100px; padding: 0 1rem }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere }}
h2 {{ font-size: 1.05rem; margin: 1.8rem 0 .3rem; overflow-wrap: anywhere }}
h3 {{ font-size: .95rem; margin: 1rem 0 .2rem }} bdi {{ unicode-bidi: isolate }}
dl {{ display: grid; grid-template-columns: 9rem 1fr; gap: .1rem .8rem; margin: .3rem 0 }}
dd {{ margin: 0; overflow-wrap: anywhere }}
.pictures {{ display: flex; flex-wrap: wrap; gap: 1.5rem }} figure {{ margin: .4rem 0 }}
figcaption {{ opacity: .75 }}
svg text {{ font-size: 12px; fill: currentColor }} svg .bar {{ fill: var(--bar) }}
svg .spread {{ stroke: currentColor }}
pre {{ overflow: auto; border: 1px solid var(--line); padding: .6rem; font-size: 12px }}
.change {{ color: #2d8a4e }} .unknown {{ color: #c08020 }} .partial {{ color: #c8453a }}
</style>
<h1>{title}</h1>
<p>{summary}
{routes}
<h2>To paste</h2>
{snippets}
<h2>Rules</h2>
<ul>{rules}</ul>
</html>
"""


def _escaped(text: str) -> str:
    """As text of the page: without what a terminal would obey, whoever prints the page."""
    return html.escape(printable(text))


def _lines(text: str) -> str:
    return "\n".join(map(_escaped, text.split("\n")))


def page(name: str, told: dict[str, Any], together: str | None, beyond: str | None) -> str:
    """A page of what ``_advised.as_json`` tells."""
    summary = (
        f"{counted(told['requests'], 'request')} {'was' if told['requests'] == 1 else 'were'} replayed under each "
        "strategy."
    )
    if told["warm_bytes"] is not None:
        summary += (
            f" For all routes together: keep {size_text(told['warm_bytes'])} warm for {told['decay_seconds']:g} s."
        )
        if told["warm"] is not None:
            summary += f" Measured: {told['warm']['reason']}."
    if told["at_once"] is not None:
        summary += f" All routes together: {_at_once.text_of(told['at_once'])}."
    if together is not None:
        summary += f" All in one process: {together}."
    partial = "<p class=partial>Interrupted: this is what was measured until then." if told["is_partial"] else ""
    left = "".join(f"<h2><bdi>{_escaped(one)}</bdi>: not measured</h2>" for one in told["routes_left"])
    left += "" if beyond is None else f"<p>{_escaped(beyond)}"
    return _PAGE.format(
        title=_escaped(f"ctxalloc: advice from {name}"),
        summary=_escaped(summary) + partial,
        routes="".join(map(_route, told["routes"])) + left,
        snippets="".join(
            f"<h3>{_escaped(where)}</h3><pre>{_lines(text)}</pre>" for where, text in told["snippets"].items()
        )
        or "<p>nothing",
        rules="".join(f"<li>{_escaped(rule)}" for rule in told["rules"]),
    )


_HEADLINES: Final = {"unknown": "not known", "leave": "leave it as it is"}


def _route(one: dict[str, Any]) -> str:
    headline = _HEADLINES.get(one["verdict"], f"use {one['strategy']}")
    rows = [("recorded under", one["as_it_is"]["handler"]), ("why", one["reason"])]
    if one["limit_bytes"] is not None:
        sizes = f"limit_bytes={one['limit_bytes']}, reserve_bytes={one['reserve_bytes']}"
        rows.append(("set", sizes + _at_once.set_text(one)))
    if one["warm_bytes"] is not None:
        rows.append(("keep warm", f"{size_text(one['warm_bytes'])} for {one['decay_seconds']:g} s"))
    rows.append(("rests on", one["confidence"]))
    rows += [("changed by", text) for text in one["would_change"]]
    if one["is_partial"]:
        rows.append(("interrupted", "measured in part"))
    listed = "".join(f"<dt>{_escaped(what)}<dd>{_escaped(text)}" for what, text in rows)
    return (
        f"<h2><bdi>{_escaped(one['route'])}</bdi>: <span class={one['verdict']}>{_escaped(headline)}</span></h2>"
        f"<dl>{listed}</dl><div class=pictures>{_pictures(one)}</div>"
    )


def _pictures(one: dict[str, Any]) -> str:
    drawn = []
    for what, field, scale, unit in (
        ("CPU time of a replay", "cpu", 1000, "ms"),
        ("page faults of a replay", "faults", 1, ""),
        ("resident memory at the peak", "peak_bytes", None, ""),
    ):
        values = {
            name: [part[field] for part in rounds if part[field] is not None] for name, rounds in one["rounds"].items()
        }
        if values and all(values.values()):
            drawn.append(_bars(what, values, scale, unit))
    if one["sizes"]:
        drawn.append(_sizes(one["sizes"]))
    return "".join(drawn)


def _bars(what: str, values: dict[str, list[float]], scale: float | None, unit: str) -> str:
    """A bar for each strategy, as long as its median, with a line from its smallest to its largest round."""
    top = max(max(rounds) for rounds in values.values()) or 1
    parts = []
    for row, (name, rounds) in enumerate(values.items()):
        median, y = statistics.median(rounds), row * (_BAR + 8)
        text = size_text(median) if scale is None else f"{median * scale:.4g} {unit}".strip()
        long, low, most = (value / top * 200 for value in (median, min(rounds), max(rounds)))
        middle = y + _BAR / 2
        parts.append(
            f'<text x="0" y="{y + 12}">{_escaped(name)}</text>'
            f'<rect class=bar x="110" y="{y}" width="{long:.1f}" height="{_BAR}"/>'
            f'<line class=spread x1="{110 + low:.1f}" x2="{110 + most:.1f}" y1="{middle}" y2="{middle}"/>'
            f'<text x="{118 + most:.1f}" y="{y + 12}">{_escaped(text)}</text>'
        )
    return _figure(what, parts, len(values) * (_BAR + 8))


def _sizes(sizes: dict[str, int]) -> str:
    """How many blocks there are of each size."""
    counts = {int(size): count for size, count in sizes.items()}
    top, first, last = max(counts.values()), min(counts), max(counts)
    width = min(24.0, (_WIDTH - 40) / (last - first + 1))
    parts = []
    for size in range(first, last + 1):
        high = counts.get(size, 0) / top * 80
        x = (size - first) * width
        label = f"{counts.get(size, 0)} blocks of up to {size_text(1 << size)}"
        parts.append(
            f'<rect class=bar x="{x:.1f}" y="{80 - high:.1f}" width="{width - 1:.1f}" height="{high:.1f}">'
            f"<title>{_escaped(label)}</title></rect>"
        )
    parts.append(f'<text x="0" y="96">{size_text(1 << first)}</text>')
    parts.append(f'<text x="{max(90, (last - first) * width):.1f}" y="96">{size_text(1 << last)}</text>')
    return _figure("blocks by size", parts, 100)


def _figure(what: str, parts: list[str], height: float) -> str:
    said = _escaped(what)
    return (
        f'<figure><figcaption>{said}</figcaption><svg width="{_WIDTH}" height="{height}" role=img aria-label="{said}">'
        f"{''.join(parts)}</svg></figure>"
    )
