"""What to paste to follow advice: for Python's middleware, for Rust's layer, for Dask's plugin."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from ctxalloc._choices import pattern_of
from ctxalloc._replay import BASE
from ctxalloc._sites import UNNAMED


class Set(NamedTuple):
    """What a route is to get."""

    route: str
    strategy: str | None
    """None: the one that it has, which is not written here."""
    limit_bytes: int | None
    reserve_bytes: int | None
    waits: bool = False
    """Whether it reserves that of the routes' common budget."""


class Common(NamedTuple):
    """The budget that routes reserve of."""

    limit_bytes: int
    timeout_seconds: int
    max_waiting: int | None = None
    """None: its usual number."""


class Kept(NamedTuple):
    """What the process keeps warm."""

    warm_bytes: int
    decay_seconds: float


_PYTHON: Final = {
    BASE: ("strategies.System()", None),
    "pool": (None, None),
    "arena": ("strategies.Arena()", None),
    "hugepages": ("huge_pages", "huge_pages = strategies.HugePages()"),
    "tracked": ("strategies.Tracked()", None),
    "locked": ("locked", "locked = strategies.Locked()"),
    "numa": ("numa", 'numa = strategies.Numa(policy="interleave")'),
    "shared_memory": ("strategies.SharedMemory()", None),
    "guard": ("guard", "guard = strategies.Guard()"),
}
"""The strategy of a request in Python, and a line that makes it once for all."""

_RUST: Final = {
    BASE: (".strategy(System)", "System"),
    "pool": ("", None),
    "arena": (".strategy(Arena::over(Pool::shared()))", "Arena, Pool"),
    "tracked": ('.strategy(Tracked::new(Pool::shared().clone()).expect("a pool"))', "Pool, Tracked"),
    "shared_memory": ('.strategy(SharedMemory::new().expect("Linux"))', "SharedMemory"),
}
_RUST_HANDLERS: Final = {"hugepages": "HugePages::transparent()", "locked": "LockedPages::untried()"}
_HANDLERS: Final = ("hugepages", "locked", "aligned64")
"""Strategies that are handlers of the table by these names."""
_UNNAMED: Final = (
    "# For all paths without a row. A row, or name= in the terms, gives requests a name, and advice of their own."
)
"""Of requests of a middleware that have no name."""
_COMMON: Final = (
    "Who finds no room here waits in line. A route that has a budget or a tenant keeps that: leave reserve_bytes,",
    "budget and timeout out of its line. All that is charged to this budget must reserve of it.",
)
"""Of the budget that routes have together."""
_KEEP: Final = "What a route has beside these terms it keeps:"


def _its_own(one: Set) -> list[str]:
    """What is not written of what a route has: one text, or none."""
    kept = [] if one.limit_bytes is not None else ["limit"]
    kept += [] if one.strategy else ["strategy"]
    return [f"and the {' and the '.join(kept)} that it has"] if kept else []


def _noted(line: str, mark: str, notes: Sequence[str]) -> str:
    """A line with a comment behind it, if there is one to make."""
    return f"{line}{mark} {', '.join(notes)}" if notes else line


def _aligned(strategy: str | None) -> int | None:
    found = re.fullmatch(r"aligned(\d+)", strategy or "")
    return int(found[1]) if found else None


def is_pattern(route: str) -> bool:
    """Whether the middlewares take it as a row of ``routes``."""
    try:
        pattern_of(route)
    except ValueError:
        return False
    return True


def _whose(one: Set) -> str:
    """Which requests of a program a name that is no route stands for."""
    called = f"is called {one.route!r}"
    return {"": "has no name", UNNAMED: f"has no name or {called}"}.get(one.route, called)


def python(sets: Sequence[Set], kept: Kept | None, at_once: Common | None = None) -> str:
    """The middleware's ``routes``, and requests by hand for names that are no routes.

    ``at_once``: the budget of those that wait.
    """
    rows: list[str] = []
    by_hand: list[str] = []
    default: list[str] = []
    lines: list[str] = []
    for one in sets:
        strategy, line = _PYTHON.get(one.strategy or "", (None, None))
        if (align := _aligned(one.strategy)) is not None:
            strategy = f"strategies.Aligned(align={align})"
        if line is not None and line not in lines:
            lines.append(line)
        words = [] if is_pattern(one.route) or not one.route else [f"name={one.route!r}"]
        words += [] if one.limit_bytes is None else [f"limit_bytes={one.limit_bytes}"]
        words += [] if one.reserve_bytes is None else [f"reserve_bytes={one.reserve_bytes}"]
        if one.waits and at_once is not None:
            words += ["budget=at_once", f"timeout={at_once.timeout_seconds}"]
        words += [] if strategy is None else [f"strategy={strategy}"]
        terms = f"ctxalloc.request({', '.join(words)})"
        # An arena is for one request: a function makes each its own.
        choice = f"{'lambda scope: ' if one.strategy == 'arena' else ''}{terms}"
        if not one.route:
            default += [_UNNAMED, _noted(f"default = {choice}", "  #", _its_own(one))]
        if not is_pattern(one.route):
            by_hand.append(f"# In place of each request of your code that {_whose(one)}:")
            by_hand.append(_noted(f"with {terms}:", "  #", _its_own(one)))
            by_hand.append("    ...  # the work")
        else:
            rows.append(_noted(f"    {one.route!r}: {choice},", "  #", _its_own(one)))
    text = ["import ctxalloc", "from ctxalloc import strategies", "from ctxalloc.asgi import AllocatorMiddleware", ""]
    if kept is not None:
        text.append(f"ctxalloc.configure(warm_bytes={kept.warm_bytes}, decay_seconds={kept.decay_seconds:g})")
    text += lines
    if at_once is not None:
        text += [
            *(f"# {line}" for line in _COMMON),
            f'at_once = ctxalloc.Budget({at_once.limit_bytes}, name="at once")',
        ]
        text += [] if at_once.max_waiting is None else [f"at_once.max_waiting = {at_once.max_waiting}"]
    text += [f"# {_KEEP} whole, budget, strict, timeout, a default."] if sets else []
    text += ["routes = {", *rows, "}"] if rows else []
    text += default
    given = [f"{name}={name}" for name, is_there in (("routes", rows), ("default", default)) if is_there]
    if given:
        text.append(f"app = AllocatorMiddleware(app, {', '.join(given)})  # wsgi and django have the same")
    text += by_hand
    return "\n".join(text)


def _use(module: str, names: set[str]) -> str:
    listed = ", ".join(sorted(names))
    return f"use ctxalloc::{module}::{listed if len(names) == 1 else f'{{{listed}}}'};"


def _rust_text(text: str) -> str:
    """A literal of Rust. What does not print is escaped: the compiler refuses some of it."""

    def escaped(one: str) -> str:
        if one in '"\\':
            return f"\\{one}"
        return one if one.isprintable() else f"\\u{{{ord(one):x}}}"

    return f'"{"".join(map(escaped, text))}"'


def _axum(path: str) -> str:
    """A path as axum writes it: a parameter has no type, and one that takes slashes has a star."""
    starred = re.sub(r"\{(\w+):path\}", r"{*\1}", path)
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", starred)


def _in_rust(one: Set, names: set[str], sources: set[str], shared: list[str]) -> str:
    """What changes the terms of a route, and what that needs."""
    strategy, needs = _RUST.get(one.strategy or "", ("", None))
    names |= set() if needs is None else set(needs.split(", "))
    if one.strategy in _RUST_HANDLERS:
        source = _RUST_HANDLERS[one.strategy]
        names |= {"Pool", "PoolOptions"}
        sources.add(source.partition("::")[0])
        line = f"let {one.strategy} = Pool::over({source}, PoolOptions::default());"
        shared += [line] if line not in shared else []
        strategy = f".strategy({one.strategy}.clone())"
    if (align := _aligned(one.strategy)) is not None:
        names.add("Aligned")
        strategy = f'.strategy(Aligned::new({align}).expect("a power of two"))'
    limit = "" if one.limit_bytes is None else f".limit_bytes({one.limit_bytes})"
    reserve = "" if one.reserve_bytes is None else f".reserve_bytes({one.reserve_bytes})"
    return f"{limit}{reserve}{'.budget(&at_once)' if one.waits else ''}{strategy}"


def _beside(one: Set) -> list[str]:
    """What the line of a route does not say."""
    strategy = one.strategy
    is_said = strategy is None or strategy in _RUST or strategy in _RUST_HANDLERS or _aligned(strategy) is not None
    return _its_own(one) + ([] if is_said else [f"and the strategy {strategy}"])


def rust(sets: Sequence[Set], at_once: Common | None = None) -> str:
    """The layer of tower: terms by route; requests by hand for names that are no routes. ``at_once``: as in Python."""
    names: set[str] = set()
    sources: set[str] = set()
    shared: list[str] = []
    arms: dict[tuple[str, str], str] = {}
    aside: list[str] = []
    for one in sets:
        if not is_pattern(one.route):
            terms = _in_rust(one, set(), set(), [])
            name = f".name({_rust_text(one.route)})" if one.route else ""
            where = "" if one.route else ", where a request has no name"
            aside.append(f"// By hand{where}: ctxalloc::request(){name}{terms}")
            continue
        method, path = pattern_of(one.route)
        key = "_" if method is None else _rust_text(method), _rust_text(_axum(path))
        if key in arms:
            aside.append(f"// {_rust_text(one.route)} is a route that axum does not tell from one above")
            continue
        arms[key] = _noted(f"terms{_in_rust(one, names, sources, shared)},", " //", _beside(one))
    if not arms:
        return "\n".join(aside)
    wait: list[str] = []
    if at_once is not None:
        names.add("Budget")
        shared += [f"// {line}" for line in _COMMON]
        shared += [f'let at_once = Budget::new("at once", Some({at_once.limit_bytes}));']
        shared += [] if at_once.max_waiting is None else [f"at_once.set_max_waiting({at_once.max_waiting});"]
        wait.append(f"let layer = layer.waiting().timeout(Duration::from_secs({at_once.timeout_seconds}));")
    uses = [_use(module, found) for module, found in (("source", sources), ("strategy", names)) if found]
    # As they are called in the recording.
    name = 'format!("{} {route}", parts.method)' if any(method != "_" for method, _ in arms) else "route.to_owned()"
    # Those of any method come behind those of one.
    lines = [f"        ({method}, {path}) => {terms}" for (method, path), terms in arms.items() if method != "_"]
    lines += [f"        ({method}, {path}) => {terms}" for (method, path), terms in arms.items() if method == "_"]
    return "\n".join(
        [
            "use axum::extract::MatchedPath;",
            *uses,
            "use ctxalloc::tower::RequestLayer;",
            *(["use std::time::Duration;"] if wait else []),
            "",
            *shared,
            f"// {_KEEP} a budget, a timeout, a handler.",
            "let layer = RequestLayer::new().terms(move |parts, terms| {",
            "    let route = parts.extensions.get::<MatchedPath>()?.as_str();",
            f"    let terms = terms.name({name});",
            "    Some(match (parts.method.as_str(), route) {",
            *lines,
            "        _ => terms,",
            "    })",
            "});",
            *wait,
            *aside,
        ]
    )


def dask(sets: Sequence[Set]) -> str | None:
    """The plugin of Dask: terms by the prefix of a task's key, which is never empty. None: there are no names."""
    rows = []
    for one in filter(lambda one: one.route, sets):
        if one.strategy in _HANDLERS:
            terms, why = f'{{"handler": "{one.strategy}"}}', "  # a handler has no account and no limit"
        else:
            terms = "{}" if one.limit_bytes is None else f'{{"limit_bytes": {one.limit_bytes}}}'
            why = "" if one.strategy == "pool" else "  # with the pool, as all requests of tasks"
        rows.append(f"    {one.route!r}: {terms},{why}")
    if not rows:
        return None
    return "\n".join(
        [
            "from ctxalloc.dask import RequestPlugin",
            "",
            "prefixes = {",
            *rows,
            "}",
            "client.register_plugin(RequestPlugin(prefixes=prefixes))",
        ]
    )
