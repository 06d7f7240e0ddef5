"""What a framework says of its own routes at the start: its ``root_path``, and which of ours match none of them.

Nothing of a framework is imported here: it is asked by the attributes that Starlette, FastAPI and Flask have.
Neighbours: ``asgi``, ``wsgi``; ``_frameworks`` asks for each request.
"""

import difflib
import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ctxalloc._choices import parts_of, pattern_of
from ctxalloc._errors import RouteWarning
from ctxalloc._frameworks import NOTHING, application_of, flattened
from ctxalloc._native import RouteTable

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


class _Known(NamedTuple):
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
            return root
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


def _matches_any(route: str, endpoints: list[_Known]) -> bool:
    method, path = pattern_of(route)
    is_exact = "{" not in path
    found: Any = (route, None, None, False, route)
    no: Any = (None, None, None, False, None)
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


def _is_like(endpoint: _Known, path: str) -> bool:
    """Whether the endpoint, all of whose parameters take anything, may serve this path."""
    pieces = _STARLETTES.sub("\0", _FLASKS.sub("\0", endpoint.path)).split("\0")
    return len(pieces) > 1 and re.fullmatch(".+".join(map(re.escape, pieces)), path, re.DOTALL) is not None


def _endpoints(app: Any) -> list[_Known] | None:
    """All routes of an application; None where it cannot be asked."""
    app = application_of(app)
    if app is None:
        return None
    if isinstance(getattr(app, "routes", None), list):
        found = list(flattened(app.routes, NOTHING, []))
        if not all(endpoint.path for endpoint in found):  # a route of a kind that is not known
            return None
        return [_Known(endpoint.path, _sample(_STARLETTES, endpoint.path), endpoint.methods) for endpoint in found]
    return [
        _Known(rule.rule, _sample(_FLASKS, rule.rule), frozenset(rule.methods) if rule.methods else None)
        for rule in app.url_map.iter_rules()
    ]


def _sample(parameters: re.Pattern[str], path: str) -> str:
    return parameters.sub(lambda found: _SAMPLES.get(found.group(1) or "", "x"), path)
