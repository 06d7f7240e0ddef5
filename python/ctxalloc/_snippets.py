"""What to paste to follow advice: for Python's middleware, for Rust's layer, for Dask's plugin."""

import json
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from ctxalloc._choices import pattern_of
from ctxalloc._replay import BASE


class Set(NamedTuple):
    """What a route is to get."""

    route: str
    strategy: str
    limit_bytes: int | None
    reserve_bytes: int | None


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


def _aligned(strategy: str) -> int | None:
    found = re.fullmatch(r"aligned(\d+)", strategy)
    return int(found[1]) if found else None


def is_pattern(route: str) -> bool:
    """Whether the middlewares take it as a row of ``routes``."""
    try:
        pattern_of(route)
    except ValueError:
        return False
    return True


def python(sets: Sequence[Set], kept: Kept | None) -> str:
    """The middleware's ``routes``, and requests by hand for names that are no routes."""
    rows: list[str] = []
    by_hand: list[str] = []
    lines: list[str] = []
    for one in sets:
        strategy, line = _PYTHON.get(one.strategy, (None, None))
        if (align := _aligned(one.strategy)) is not None:
            strategy = f"strategies.Aligned(align={align})"
        if line is not None and line not in lines:
            lines.append(line)
        words = [] if is_pattern(one.route) or not one.route else [f"name={one.route!r}"]
        words += [] if one.limit_bytes is None else [f"limit_bytes={one.limit_bytes}"]
        words += [] if one.reserve_bytes is None else [f"reserve_bytes={one.reserve_bytes}"]
        words += [] if strategy is None else [f"strategy={strategy}"]
        terms = f"ctxalloc.request({', '.join(words)})"
        if not is_pattern(one.route):
            by_hand.append(f"with {terms}:\n    ...  # the work")
        else:
            # An arena is for one request: a function makes each its own.
            rows.append(f"    {one.route!r}: {'lambda scope: ' if one.strategy == 'arena' else ''}{terms},")
    text = ["import ctxalloc", "from ctxalloc import strategies", "from ctxalloc.asgi import AllocatorMiddleware", ""]
    if kept is not None:
        text.append(f"ctxalloc.configure(warm_bytes={kept.warm_bytes}, decay_seconds={kept.decay_seconds:g})")
    text += lines
    if rows:
        text += [
            "routes = {",
            *rows,
            "}",
            "app = AllocatorMiddleware(app, routes=routes)  # wsgi and django have the same",
        ]
    text += by_hand
    return "\n".join(text)


def _use(module: str, names: set[str]) -> str:
    listed = ", ".join(sorted(names))
    return f"use ctxalloc::{module}::{listed if len(names) == 1 else f'{{{listed}}}'};"


def rust(sets: Sequence[Set]) -> str:
    """The layer of tower: terms by route. There is none without a name."""
    arms: list[str] = []
    names: set[str] = set()
    sources: set[str] = set()
    shared: list[str] = []
    for one in filter(lambda one: one.route, sets):
        strategy, needs = _RUST.get(one.strategy, ("", None))
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
        # axum's route is without the method.
        path = pattern_of(one.route)[1] if is_pattern(one.route) else one.route
        limit = "" if one.limit_bytes is None else f".limit_bytes({one.limit_bytes})"
        reserve = "" if one.reserve_bytes is None else f".reserve_bytes({one.reserve_bytes})"
        arm = f"        {json.dumps(path, ensure_ascii=False)} => terms{limit}{reserve}{strategy},"
        arms += [arm] if arm not in arms else []
    uses = [_use(module, found) for module, found in (("source", sources), ("strategy", names)) if found]
    return "\n".join(
        [
            "use axum::extract::MatchedPath;",
            *uses,
            "use ctxalloc::tower::RequestLayer;",
            "",
            *shared,
            "let layer = RequestLayer::new().terms(move |parts, terms| {",
            "    let route = parts.extensions.get::<MatchedPath>()?.as_str().to_owned();",
            "    let terms = terms.name(route.clone());",
            "    Some(match route.as_str() {",
            *arms,
            "        _ => terms,",
            "    })",
            "});",
        ]
    )


def dask(sets: Sequence[Set]) -> str:
    """The plugin of Dask: terms by the prefix of a task's key, which is never empty."""
    rows = []
    for one in filter(lambda one: one.route, sets):
        if one.strategy in ("hugepages", "locked", "aligned64"):
            terms, why = f'{{"handler": "{one.strategy}"}}', "  # a handler has no account and no limit"
        elif one.limit_bytes is None:
            terms, why = "{}", ""
        else:
            terms, why = f'{{"limit_bytes": {one.limit_bytes}}}', ""
        rows.append(f"    {one.route!r}: {terms},{why}")
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
