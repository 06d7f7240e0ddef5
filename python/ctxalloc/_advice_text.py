"""What ``ctxalloc recommend`` prints: the numbers that it gives to programs, as text."""

from pathlib import Path
from typing import Any, Final, TextIO

from ctxalloc import _at_once, _together
from ctxalloc._text import counted, printable, size_text, tidy

ALL_ROUTES: Final = "all routes"


def together_text(told: dict[str, Any]) -> str | None:
    """What all routes together take as advised. None: nothing was replayed together, or nothing is advised."""
    if told["together"] is None:
        return None
    if told["together"]["problem"] is not None:
        return (
            f"they could not be replayed together as advised, which may withdraw advice: {told['together']['problem']}"
        )
    if told["together"]["untried"]:
        return "interrupted before all routes were replayed together as advised, which may withdraw advice"
    rounds = told["together"]["rounds"]
    return _together.text_of(rounds) if rounds else "nothing that is advised for one route is good for all together"


def headline(one: dict[str, Any]) -> str:
    """The advice for a route in a few words."""
    if one["verdict"] == "unknown":
        return "not known"
    if one["verdict"] == "change":
        return f"use {one['strategy']}"
    return f"leave it as it is, recorded under {one['as_it_is']['handler']}"


def gain_text(gain: dict[str, Any]) -> str:
    """What a strategy saves, with its spread."""
    middle, low, most = (tidy(gain[f"{which}_seconds"] * 1e6, 1) for which in ("cpu", "low", "high"))
    text = f"{middle:.1f} us of CPU a request ({low:.1f} to {most:.1f})"
    text += f", {tidy(gain['share'], 3):.1%} of its time"
    text += f"; {tidy(gain['faults'], 1):.1f} page faults a request"
    if gain["peak_bytes"] is not None:
        text += f"; {size_text(gain['peak_bytes'])} of RSS at the peak"
    return f"{gain['strategy']} saves {text}"


def beyond_text(told: dict[str, Any]) -> str | None:
    """Which routes are not told. None: all are."""
    routes, requests = (told["routes_beyond"][what] for what in ("routes", "requests"))
    if not routes:
        return None
    more = counted(routes, "more route")
    return f"{more}, with {counted(requests, 'request')} together: not measured; --route NAME advises one of them"


def tell_all(path: Path, told: dict[str, Any], out: TextIO) -> None:
    def tell(text: str) -> None:
        print(printable(text), file=out)  # names of routes are a program's own

    print(file=out)
    tell(f"{path.name}: {counted(told['requests'], 'request')} in {counted(len(told['routes']), 'route')}")
    if told["is_partial"]:
        tell("  interrupted: what follows is what was measured until then")
    for one in told["routes"]:
        partial = " (measured in part)" if one["is_partial"] else ""
        print(file=out)
        tell(f"{one['route']}: {headline(one)}{partial}")
        tell(f"  why         {one['reason']}")
        if one["gain"] is not None:
            tell(f"  measured    {gain_text(one['gain'])}")
        if one["limit_bytes"] is not None:
            sizes = f"limit_bytes={one['limit_bytes']} ({size_text(one['limit_bytes'])})"
            sizes += f", reserve_bytes={one['reserve_bytes']} ({size_text(one['reserve_bytes'])})"
            tell(f"  set         {sizes}{_at_once.set_text(one)}")
        if one["warm_bytes"] is not None:
            tell(f"  keep warm   {size_text(one['warm_bytes'])} for {one['decay_seconds']:g} s")
        tell(f"  rests on    {one['confidence']}")
        for number, text in enumerate(one["would_change"]):
            tell(f"  {'changed by' if number == 0 else '':<11} {text}")
    for name in told["routes_left"]:
        print(file=out)
        tell(f"{name}: not measured")
    if (beyond := beyond_text(told)) is not None:
        print(file=out)
        tell(beyond)
    if told["warm_bytes"] is None:
        print(file=out)
        tell(f"{ALL_ROUTES} together: no route has a pool, so there is nothing to keep warm")
    else:
        warm = f"warm_bytes={told['warm_bytes']}, decay_seconds={told['decay_seconds']:g}"
        print(file=out)
        tell(f"{ALL_ROUTES} together: keep {warm} in each process (ctxalloc.configure)")
        if told["warm"] is not None:
            tell(f"  {told['warm']['reason']}")
    if told["at_once"] is not None:
        tell(f"  {_at_once.text_of(told['at_once'])}")
    if (together := together_text(told)) is not None:
        tell(f"  {together}")
    for where, snippet in told["snippets"].items():
        print(file=out)
        tell(f"# {where}")
        for line in snippet.splitlines():
            tell(line)
    print(file=out)
    tell("rules:")
    for rule in told["rules"]:
        tell(f"  - {rule}")
