"""What a framework says of its own routes: its ``root_path``, and which of ours match none of them.

Paths are matched by ``src/python/exchange/routes.rs``, before the framework looks at them. Nothing of a framework is
imported here: it is asked by the attributes that Starlette, FastAPI and Flask have. Neighbours: ``asgi``, ``wsgi``.
"""

import difflib
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from ctxalloc._errors import RouteWarning
from ctxalloc._native import RouteTable
from ctxalloc._serving import parts_of, pattern_of

log = logging.getLogger("ctxalloc")

_SAMPLES: Final = {
    "int": "1",
    "float": "1.5",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "path": "x/y",
}
"""A value of each kind of parameter."""

_STARLETTES: Final = re.compile(r"\{\w+(?::(\w+))?\}")
_FLASKS: Final = re.compile(r"<(?:(\w+)(?:\([^)]*\))?:)?\w+>")
_MAX_DEPTH: Final = 64
"""Applications around applications."""


class _Endpoint(NamedTuple):
    """A route of the framework."""

    path: str
    """As the framework writes it."""
    sample: str
    """A path that it serves."""
    methods: frozenset[str] | None
    """None: any."""


def root_path_of(app: Any) -> str:
    """The ``root_path`` that the application gives to every request of its own accord, as FastAPI does; or ''."""
    for _ in range(_MAX_DEPTH):
        root = getattr(app, "root_path", None)
        if isinstance(root, str):
            return root.rstrip("/")
        app = getattr(app, "app", None)
        if app is None:
            break
    return ""


def warn_of_typos(routes: Sequence[str], app: Any) -> None:
    """RouteWarning for each of these patterns that matches no route of the application, if that can be asked."""
    try:
        endpoints = _endpoints(app)
        unmatched = [route for route in routes if endpoints and not _matches_any(route, endpoints)]
    except Exception:
        log.debug("the routes of %r cannot be read", app, exc_info=True)
        return
    names = sorted({endpoint.path for endpoint in endpoints or ()})
    for route in unmatched:
        near = difflib.get_close_matches(pattern_of(route)[1], names, 3, 0.0)
        warnings.warn(
            f"routes: {route!r} matches no route of the application, so its terms are for nothing; the nearest are "
            f"{', '.join(map(repr, near))}",
            RouteWarning,
            stacklevel=2,
        )


def _matches_any(route: str, endpoints: list[_Endpoint]) -> bool:
    method, path = pattern_of(route)
    is_exact = "{" not in path
    found: Any = (route, None, None, False)
    no: Any = (None, None, None, False)
    if is_exact:
        table = RouteTable([(path, found)], [], no, has_methods=False)
    else:
        table = RouteTable([], [(None, *parts_of(path, route), found)], no, has_methods=False)
    for endpoint in endpoints:
        if method is not None and endpoint.methods is not None and method not in endpoint.methods:
            continue
        # A route without parameters may be one value of the framework's.
        own = path if is_exact and _is_like(endpoint, path) else endpoint.sample
        if table.find({}, "method", own)[0] == route:
            return True
    return False


def _is_like(endpoint: _Endpoint, path: str) -> bool:
    """Whether the endpoint, all of whose parameters take anything, may serve this path."""
    pieces = _STARLETTES.sub("\0", _FLASKS.sub("\0", endpoint.path)).split("\0")
    return len(pieces) > 1 and re.fullmatch(".+".join(map(re.escape, pieces)), path, re.DOTALL) is not None


def _endpoints(app: Any) -> list[_Endpoint] | None:
    """All routes of an application; None where it cannot be asked."""
    for _ in range(_MAX_DEPTH):
        routes, url_map = getattr(app, "routes", None), getattr(app, "url_map", None)
        if isinstance(routes, list):
            return list(_of_starlette(routes, ""))
        if url_map is not None and hasattr(url_map, "iter_rules"):
            return list(_of_flask(url_map))
        app = getattr(app, "app", None) or getattr(app, "__self__", None)
        if app is None:
            break
    return None


def _of_starlette(routes: list[Any], before: str) -> Iterator[_Endpoint]:
    for route in routes:
        path = before + getattr(route, "path", "")
        nested = getattr(route, "routes", None)
        if nested:
            yield from _of_starlette(nested, path)
        elif hasattr(route, "app") and not hasattr(route, "endpoint"):  # a mount of something else
            yield _Endpoint(f"{path}/{{path:path}}", _sample(_STARLETTES, f"{path}/{{path:path}}"), None)
        else:
            methods = getattr(route, "methods", None)
            yield _Endpoint(path, _sample(_STARLETTES, path), frozenset(methods) if methods else None)


def _of_flask(url_map: Any) -> Iterator[_Endpoint]:
    for rule in url_map.iter_rules():
        methods = frozenset(rule.methods) if rule.methods else None
        yield _Endpoint(rule.rule, _sample(_FLASKS, rule.rule), methods)


def _sample(parameters: re.Pattern[str], path: str) -> str:
    return parameters.sub(lambda found: _SAMPLES.get(found.group(1) or "", "x"), path)
