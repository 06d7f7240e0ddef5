"""What a request of a server may get: the middlewares' ``routes``, ``default`` and ``unmatched``, checked.

``table_of`` makes of them what a request is looked up in. Neighbours: ``_serving`` begins requests on these terms;
``_frameworks`` says which row is written as which route of a framework; ``src/python/exchange/routes.rs`` matches.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ctxalloc._native import Handler, Request, RouteTable, request

Scope: TypeAlias = MutableMapping[str, Any]
"""An ASGI scope or a WSGI environment."""

Terms: TypeAlias = Request | Handler | str | None
"""What a request of the server gets: a request of ours on these terms, a handler only, or nothing."""

Choice: TypeAlias = Terms | Callable[[Scope], Terms]
"""Terms, or a function that chooses them for a scope."""

Unmatched: TypeAlias = Literal["default", "strictest"]
"""What a path gets that no row matches: ``default``, or the strictest terms of all rows."""

ACCOUNT: Final = request()
"""Terms without a limit: an account only."""

UNMATCHED: Final = "unmatched"
"""The name of requests on the strictest terms. No pattern is called this: patterns begin with a slash."""

CHOICES: Final = (
    "give a ctxalloc.request(...), a Handler, the name of one, None, or a function that returns one of them"
)


class Found(NamedTuple):
    """A row of ``routes``, and what its requests get."""

    route: str | None
    choice: Choice
    terms: Request | None
    """The choice, if it is a ``ctxalloc.request(...)``, as most are."""
    has_budget: bool
    """Whether these terms name a budget."""
    name: str | None
    """What its requests are called, if their terms do not say."""


class Row(NamedTuple):
    """A row of ``routes``, by which ``_frameworks`` finds the one that is written as a route."""

    method: str | None
    path: str


def found_of(route: str | None, choice: Choice, where: str, name: str | None = None) -> Found:
    """A row, checked. ValueError, TypeError: it is not valid."""
    choice = _checked(choice, where)
    if isinstance(choice, Request):  # first: it is callable too, as a decorator
        return Found(route, choice, choice, choice._wanted_budget is not None, name or route)  # noqa: SLF001
    return Found(route, choice, None, has_budget=False, name=name or route)


def table_of(routes: Mapping[str, Choice], default: Choice, unmatched: Unmatched) -> tuple[RouteTable, list[Row]]:
    """What requests are looked up in, and its rows by their numbers. ValueError, TypeError: one is not valid."""
    if unmatched not in ("default", "strictest"):
        raise ValueError(f"unmatched={unmatched!r}: give 'default' or 'strictest'")
    exact: list[tuple[str, Found]] = []
    patterns: list[tuple[str | None, list[str], list[bool], Found]] = []
    rows: tuple[list[Row], list[Row]] = ([], [])
    otherwise = found_of(None, default, "default")
    has_methods = False
    for route, choice in routes.items():
        method, path = pattern_of(route)
        has_methods |= method is not None
        found = found_of(route, choice, route)
        if "{" in path:
            patterns.append((method, *parts_of(path, route), found))
        else:
            exact.append((f"{method} {path}" if method else path, found))
        rows["{" in path].append(Row(method, path))
    strictest = None if unmatched == "default" else _strictest([*routes.items(), ("default", default)])
    return RouteTable(exact, patterns, otherwise, has_methods=has_methods, unmatched=strictest), rows[0] + rows[1]


def limit_of(choice: Choice) -> float:
    """The limit in bytes of these terms; infinite where they have none, or where that is not known."""
    limit = choice._wanted_limit_bytes if isinstance(choice, Request) else None  # noqa: SLF001 - made for this
    return math.inf if limit is None else limit


def _strictest(choices: list[tuple[str, Choice]]) -> Found:
    """Terms that are as strict as each of these. ValueError: there are none that can be known."""
    advice = "leave unmatched= out, and give default= terms that are as strict as you want"
    for where, choice in choices:
        if isinstance(choice, Request) and choice._wanted_budget is not None:  # noqa: SLF001
            raise ValueError(
                f"unmatched='strictest': the terms of {where!r} name a budget, so they cannot be compared with the "
                f"others; {advice}"
            )
        if callable(choice) and not isinstance(choice, (Request, Handler)):
            raise ValueError(  # noqa: TRY004 - a function is a choice, only not for this
                f"unmatched='strictest': {where!r} has a function, whose terms are not known; {advice}"
            )
    where, choice = min(choices, key=lambda row: limit_of(row[1]))
    if limit_of(choice) == math.inf:
        raise ValueError("unmatched='strictest': no row has a limit_bytes, so there is no strictest one; give one")
    return found_of(None, choice, where, UNMATCHED)


def pattern_of(route: str) -> tuple[str | None, str]:
    """The method, if it names one, and the path. ValueError: it is no pattern."""
    method, space, path = ("", "", route) if route.startswith("/") else route.partition(" ")  # a path may have blanks
    if not path.startswith("/") or (space and not method.isupper()):
        raise ValueError(f"routes: {route!r} is no pattern; write '/path', '/path/{{name}}' or 'POST /path'")
    return method or None, "/" + path.lstrip("/")  # as paths are looked up


def parts_of(path: str, route: str) -> tuple[list[str], list[bool]]:
    """The texts around a path's parameters, and for each parameter whether it takes slashes."""
    parts = re.split(r"\{(\w+(?::\w+)?)\}", path)
    texts, names = parts[::2], parts[1::2]
    if any("{" in text or "}" in text for text in texts):
        raise ValueError(f"routes: {route!r} has a brace too many; a parameter is '{{name}}' or '{{name:path}}'")
    return texts, [name.endswith(":path") for name in names]


def plain(function: Any, where: str) -> None:
    """TypeError: it is not a function that can be called here."""
    if not callable(function):
        raise TypeError(f"{where}{function!r}: give a function")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise TypeError(f"{where}{function!r} is async, and is not awaited here; give a plain function")


def _checked(choice: Choice, where: str) -> Choice:
    if choice is None or isinstance(choice, (Request, Handler, str)):
        return choice
    if callable(choice):
        plain(choice, f"{where}: ")
        return choice
    raise TypeError(f"{where}: {choice!r} is no choice; {CHOICES}")
