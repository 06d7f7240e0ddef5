"""What ``ctxalloc run --report`` found, as JSON for programs, and two such files compared: ``ctxalloc compare``."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import metrics
from ctxalloc._native import __version__
from ctxalloc._profile import PARTS, Profile, Sums
from ctxalloc._program import Program, UsageError
from ctxalloc._text import size_text, table

VERSION: Final = 1
"""Of the format: a field that changes its meaning is another one. Fields may be added."""


class Usage(NamedTuple):
    """What the process took."""

    seconds: float
    cpu_user_seconds: float
    cpu_system_seconds: float
    page_faults: int
    process_peak_bytes: int


def as_json(  # noqa: PLR0917 - one call
    program: Program,
    handler: str | None,
    limit: int | None,
    profile: Profile,
    usage: Usage,
    children: int,
    whole: Mapping[str, Any] | None,
) -> str:
    """The whole report, with every site. ``whole``: what ``run --whole`` knows beside."""
    found = {
        "format": "ctxalloc report",
        "version": VERSION,
        "ctxalloc": __version__,
        "program": [program.name, *program.arguments],
        "is_module": program.is_module,
        "handler": handler,
        "limit_bytes": limit,
        **usage._asdict(),
        "is_complete": profile.is_complete,
        "child_processes": children,
        "refused": profile.refused,
        "all": profile.all._asdict(),
        "parts": {part: sums._asdict() for part, sums in profile.parts.items()},
        "whole": whole,
        "handlers": [{"name": name, **sums._asdict()} for name, sums in profile.handlers],
        "sites": [
            {"where": one.where, **({"part": one.part} if profile.parts else {}), **_of_site(one.sums)}
            for one in profile.sites
        ],
        "requests": [
            {
                "name": one.name,
                "requests": one.requests,
                "refused_requests": one.refused_requests,
                "escaped_blocks": one.escaped_blocks,
                "escaped_bytes": one.escaped_bytes,
                "max_peak_bytes": one.max_peak_bytes,
                "total_bytes": one.total_bytes.sum,
            }
            for one in metrics.snapshot().series.values()
        ],
    }
    return json.dumps(found, indent=1)


def _of_site(sums: Sums) -> dict[str, int]:
    """Without a peak of its own: that of each of its stacks is known, and their sum is none."""
    return {name: number for name, number in sums._asdict().items() if name != "peak_bytes"}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != "ctxalloc report":
        raise UsageError(f"{path} is no report; make one with ctxalloc run --report=json --output {path} ...")
    if found.get("version") != VERSION:
        raise UsageError(f"{path} has version {found.get('version')!r} of the format, not {VERSION}; make it anew")
    wrong = _wrong_field(found)
    if wrong is not None:
        raise UsageError(f"{path}: {wrong} is missing or no number; make the report anew")
    return found


_NUMBERS: Final = (*Usage._fields, "refused")


def _wrong_field(report: Mapping[str, Any]) -> str | None:
    """The first field that is not as ``as_json`` writes it."""
    sites = report.get("sites")
    if not isinstance(sites, list):
        return "sites"
    wanted = [
        (report, "", _NUMBERS),
        (report.get("all"), "all.", Sums._fields),
        *((site, f"sites[{at}].", ("at_peak_bytes", "total_bytes")) for at, site in enumerate(sites)),
    ]
    for numbers, place, names in wanted:
        for name in names:
            number = numbers.get(name) if isinstance(numbers, Mapping) else None
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                return f"{place}{name}"
    return next((f"sites[{at}].where" for at, site in enumerate(sites) if not isinstance(site.get("where"), str)), None)


def _by_function(report: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """What each function had at the peak, and made in all. Without lines, which move when a file is edited."""
    found: dict[str, tuple[int, int]] = {}
    for site in report["sites"]:
        place, _, function = site["where"].rpartition(" ")
        name = f"{place.rpartition(':')[0]} {function}" if ":" in place else site["where"]
        at_peak, total = found.get(name, (0, 0))
        found[name] = (at_peak + site["at_peak_bytes"], total + site["total_bytes"])
    return found


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ("" if before == after else "new")


def compare(before_path: Path, after_path: Path, sites: int, out: TextIO) -> None:
    """Prints what differs. UsageError: one of the files is no report."""
    before, after = _read(before_path), _read(after_path)
    has_parts = bool(before.get("parts") or after.get("parts"))
    blocks = "blocks" if has_parts else "arrays"
    rows: list[list[str]] = []
    lines: tuple[tuple[str, Callable[[Mapping[str, Any]], float], Callable[[float], str]], ...] = (
        ("time", lambda one: one["seconds"], _seconds),
        ("CPU, user", lambda one: one["cpu_user_seconds"], _seconds),
        ("CPU, system", lambda one: one["cpu_system_seconds"], _seconds),
        ("page faults", lambda one: one["page_faults"], _whole),
        ("process at most", lambda one: one["process_peak_bytes"], size_text),
        (f"{blocks} at the peak", lambda one: one["all"]["peak_bytes"], size_text),
        *((f"of it {part}", functools.partial(_at_peak, part), size_text) for part in (PARTS if has_parts else ())),
        (f"{blocks} in all", lambda one: one["all"]["total_bytes"], size_text),
        (f"number of {blocks}", lambda one: one["all"]["arrays"], _whole),
        ("alive at the end", lambda one: one["all"]["live_bytes"], size_text),
        ("refused", lambda one: one["refused"], _whole),
    )
    for name, value, show in lines:
        old, new = value(before), value(after)
        rows.append([name, show(old), show(new), _change(old, new)])
    table(f"{before_path} and {after_path}", ["", "before", "after", "change"], rows, out)
    olds, news = _by_function(before), _by_function(after)
    changed = [(name, olds.get(name, (0, 0)), news.get(name, (0, 0))) for name in {**olds, **news}]
    changed = [one for one in changed if one[1] != one[2]]
    changed.sort(key=lambda one: (-abs(one[2][0] - one[1][0]), -abs(one[2][1] - one[1][1]), one[0]))
    table(
        "Functions that changed most",
        ["at the peak: before", "after", "total: before", "after", "where"],
        [[*map(size_text, (old[0], new[0], old[1], new[1])), name] for name, old, new in changed[:sites]],
        out,
    )
    if len(changed) > sites:
        print(f"  and {len(changed) - sites} more: --sites shows them", file=out)


def _at_peak(part: str, report: Mapping[str, Any]) -> float:
    """What of the peak was this; of a report without parts all is arrays."""
    parts = report.get("parts") or {"arrays": report["all"]}
    return parts[part]["at_peak_bytes"] if part in parts else 0


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _whole(number: float) -> str:
    return f"{number:.0f}"
