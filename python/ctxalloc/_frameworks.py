"""What a framework's own router would serve: which of our rows is written as the route that a request reaches.

Nothing of Starlette, FastAPI and Flask is imported: they are asked by the attributes that they have. Starlette's routes
are flattened once, so that ``src/python/exchange/framework.rs`` has to ask only where several of them may be meant;
Flask and Django are asked for each request, whose other work takes much longer. docs/decisions/0032 has the reasons.
Neighbours: ``asgi``, ``wsgi`` and ``django`` call ``attach``; ``_routing`` warns of typos.
"""

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ctxalloc._choices import Row, Scope
from ctxalloc._native import RouteTable
from ctxalloc._serving import SERVING

log = logging.getLogger("ctxalloc")

NO_VIEW: Final = -1
NO_ROW: Final = -2

_STARLETTES: Final = re.compile(r"\{(\w+)(?::(\w+))?\}")
_FLASKS: Final = re.compile(r"<(?:(\w+)(?:\([^)]*\))?:)?(\w+)>")
_MAX_DEPTH: Final = 64
"""Applications around applications."""
_OWN: Final = frozenset({"starlette.routing", "fastapi.routing"})
"""Where the functions are that match as is known here."""

_FULL: Final = 2
"""``starlette.routing.Match.FULL``."""

_Rows: TypeAlias = dict[str | None, int]
"""The rows that are written as a route, by their methods."""


def has_parsed(error: BaseException | None) -> bool:
    """Whether FastAPI has made this error of another one: whatever the parsing of a body raises is a 400 there."""
    step = None if error is None else error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and step.tb_frame.f_globals.get("__name__") == "fastapi.routing"


class Endpoint(NamedTuple):
    """A route of the framework, at the end of its mounts."""

    path: str
    """As the framework writes it; '' where that is not known."""
    route: Any
    methods: frozenset[str] | None
    """None: any."""
    is_mount: bool
    """Something else is mounted there."""
    are_paths: list[bool] | None
    """For each parameter whether it takes slashes, where no parameter and nothing around it has a way of its own: then
    these and the texts between them say for each path without a line break whether the route matches it."""
    is_plain: bool
    """The first such route that takes the request's method is the one that is served, if any is."""
    moved: int | None
    """How many characters of ``path`` are before an application with a ``root_path`` of its own, or a class that
    matches in its own way: they may take what they like of the rest. None where there is none."""


class Written:
    """Which rows are written as which routes of the framework."""

    def __init__(self, rows: Sequence[Row], parameters: re.Pattern[str], kind: int, name: int) -> None:
        self._parameters, self._kind, self._name = parameters, kind, name
        self._rows: dict[str, _Rows] = {}
        texts = [(number, row, self._texts(row.path, _STARLETTES, 2, 1)) for number, row in enumerate(rows)]
        for number, row, levels in sorted(texts, key=lambda it: it[2][0] != it[2][1]):  # those without kinds first
            for text in levels:
                self._rows.setdefault(text, {}).setdefault(row.method, number)
        self._known: dict[str, _Rows] = {}

    def as_route(self, path: str) -> _Rows:
        """The rows that are written as this route; or with other kinds of parameters, or else other names of them."""
        rows = self._known.get(path)
        if rows is None:
            texts = self._texts("/" + path.lstrip("/"), self._parameters, self._kind, self._name)
            rows = self._known[path] = next((self._rows[text] for text in texts if text in self._rows), {})
        return rows

    def row(self, path: str, methods: Iterable[str | None]) -> int:
        """The number of the row, or NO_ROW."""
        rows = self.as_route(path)
        return next((rows[method] for method in methods if method in rows), NO_ROW)

    def special(self, rows: Sequence[Row], paths: Iterable[str]) -> list[int]:
        """The rows without parameters that are written as none of these routes, hence for one path of a route."""
        own = {number for path in paths for number in self.as_route(path).values()}
        return [number for number, row in enumerate(rows) if "{" not in row.path and number not in own]

    @staticmethod
    def _texts(path: str, parameters: re.Pattern[str], kind: int, name: int) -> tuple[str, str, str]:
        """A path with its parameters as ``{name:kind}``, as ``{name}`` or ``{name:path}``, and without names."""

        def exactly(found: re.Match[str]) -> str:
            return f"{{{found[name]}:{found[kind]}}}" if found[kind] else f"{{{found[name]}}}"

        text = parameters.sub(exactly, path)
        plain = _STARLETTES.sub(lambda found: found[0] if found[2] == "path" else f"{{{found[1]}}}", text)
        return text, plain, _STARLETTES.sub(lambda found: "{:path}" if found[2] else "{}", plain)


def application_of(app: Any) -> Any:
    """The application of a framework, inside of what is around it; None if there is none that can be asked."""
    for _ in range(_MAX_DEPTH):
        if isinstance(getattr(app, "routes", None), list) or hasattr(getattr(app, "url_map", None), "iter_rules"):
            return app
        app = getattr(app, "app", None) or getattr(app, "__self__", None)
        if app is None:
            break
    return None


def attach(table: RouteTable, rows: Sequence[Row], app: Any) -> None:
    """Tell a table of routes what the framework of this application serves, if that can be asked."""
    try:
        found = application_of(app)
        if found is None or not rows:
            return
        if not isinstance(getattr(found, "routes", None), list):
            flask = _Flask(found, rows)
            table.attach(flask.ask, flask.special(), None, [])
            return
        starlette = _Starlette(found, rows)
        if all(hasattr(endpoint.route, "matches") for endpoint in starlette.endpoints):
            table.attach(starlette.ask, starlette.special(), starlette.patterns(), starlette.lists)
    except Exception:
        log.warning("the routes of %r cannot be read, so `routes` are matched by paths alone", app, exc_info=True)


# ---- Starlette and FastAPI --------------------------------------------------------------------------


class _Around(NamedTuple):
    """What is around a route: mounts, hosts, included routers."""

    path: str = ""
    is_known: bool = True
    """All of it matches paths as its text says."""
    is_plain: bool = True
    """And takes the beginning of a path in one way only."""
    moved: int | None = None


NOTHING: Final = _Around()


def flattened(routes: list[Any], around: _Around, lists: list[list[Any]]) -> Iterator[Endpoint]:
    """The routes at the ends of mounts, hosts and included routers, in their order. ``lists`` gets all lists."""
    lists.append(routes)
    for route in routes:
        yield from _flattened_one(route, around, lists)


def _flattened_one(route: Any, around: _Around, lists: list[list[Any]]) -> Iterator[Endpoint]:
    own: Any = getattr(route, "path", "")
    nested = getattr(route, "routes", None)
    if hasattr(route, "effective_candidates"):  # FastAPI's include_router
        lists.append(route.original_router.routes)
        is_known = around.is_known and _matches_as_known(route) and _matches_as_known(route.original_router)
        around = around._replace(is_known=is_known, is_plain=around.is_plain and is_known)
        for candidate in route.effective_candidates():
            yield from _flattened_one(getattr(candidate, "starlette_route", None) or candidate, around, lists)
    elif isinstance(nested, list) and nested:
        path, kinds = around.path + own, _kinds(route, f"{own}/{{path:path}}")
        moved = _moved(route, around)
        if moved is None and _root_path_of(route):
            moved = len(path)
        is_known = around.is_known and kinds is not None and moved is None
        is_plain = around.is_plain and is_known and not any((kinds or [])[:-1])
        yield from flattened(nested, _Around(path, is_known, is_plain, moved), lists)
    elif hasattr(route, "app") and not hasattr(route, "endpoint"):
        yield _endpoint(route, around, f"{own}/{{path:path}}", None, is_mount=True)
    else:
        methods = frozenset(getattr(route, "methods", None) or ()) or None
        if is_websocket(route):
            methods = frozenset({"GET"})  # its handshake
        yield _endpoint(route, around, own, methods, is_mount=False)


def _endpoint(route: Any, around: _Around, own: Any, methods: frozenset[str] | None, *, is_mount: bool) -> Endpoint:
    if not isinstance(getattr(route, "path", None), str) and not is_mount:
        return Endpoint("", route, methods, is_mount, None, is_plain=False, moved=None)
    kinds, path = _kinds(route, own), around.path + own
    if kinds is None or not around.is_known:
        return Endpoint(path, route, methods, is_mount, None, is_plain=False, moved=_moved(route, around))
    are_paths = [found[2] == "path" for found in _STARLETTES.finditer(path)]
    return Endpoint(path, route, methods, is_mount, are_paths, around.is_plain, moved=None)


def _kinds(route: Any, path: str) -> list[bool] | None:
    """For each parameter of the path whether it takes slashes; None unless the route's own pattern says just that."""
    texts, kinds = _STARLETTES.sub("\0", path).split("\0"), []
    expected = "^" + re.escape(texts[0])
    for found, text in zip(_STARLETTES.finditer(path), texts[1:], strict=True):
        kinds.append(found[2] == "path")
        expected += f"(?P<{found[1]}>{'.*' if kinds[-1] else '[^/]+'})" + re.escape(text)
    pattern = getattr(getattr(route, "path_regex", None), "pattern", None)
    return kinds if pattern == expected + "$" and _matches_as_known(route) else None


def _matches_as_known(route: Any) -> bool:
    written = getattr(route, "original_route", route)  # which FastAPI asks for that of a router that is included
    return all(getattr(getattr(type(it), "matches", None), "__module__", None) in _OWN for it in (route, written))


def _moved(route: Any, around: _Around) -> int | None:
    return len(around.path) if around.moved is None and not _matches_as_known(route) else around.moved


def is_websocket(route: Any) -> bool:
    """Whether a route is one for WebSockets only."""
    return any(kind.__name__ == "WebSocketRoute" for kind in type(route).__mro__)


def _root_path_of(mount: Any) -> str:
    """The ``root_path`` that what is mounted gives to every request of its own accord, as FastAPI does; or ''."""
    root = getattr(getattr(mount, "_base_app", None) or getattr(mount, "app", None), "root_path", "")
    return root if isinstance(root, str) else ""


class _Starlette:
    """Starlette, or FastAPI, asked as its router asks its routes."""

    def __init__(self, app: Any, rows: Sequence[Row]) -> None:
        self.app = app
        self.rows = rows
        self.lists: list[list[Any]] = []
        self.endpoints = list(flattened(app.routes, NOTHING, self.lists))
        self.written = Written(rows, _STARLETTES, 2, 1)
        self.steep = [_is_steep(endpoint.path) for endpoint in self.endpoints]
        self.leaves = {id(endpoint.route) for endpoint in self.endpoints}

    def special(self) -> list[int]:
        return self.written.special(self.rows, (endpoint.path for endpoint in self.endpoints))

    def patterns(self) -> list[tuple[list[str], list[bool] | None, list[tuple[str | None, int]]]]:
        return [
            (
                _texts(endpoint),
                endpoint.are_paths,
                list(self.written.as_route(endpoint.path).items()) if endpoint.path else [],
            )
            for endpoint in self.endpoints
        ]

    def ask(self, scope: Scope, methods: list[str | None], candidates: list[int] | None) -> int:
        """See ``RouteTable.attach``."""
        if candidates is not None and any(self.steep[number] for number in candidates):
            endpoints = [self.endpoints[number] for number in candidates]
            if all(endpoint.is_plain for endpoint in endpoints):
                found = next((endpoint for endpoint in endpoints if _takes(endpoint, scope)), None)
                return NO_VIEW if found is None else self.written.row(found.path, methods)
        skipped = frozenset[int]()
        if candidates is not None:
            skipped = frozenset(self.leaves - {id(self.endpoints[number].route) for number in candidates})
        asked = dict(scope)
        root = getattr(self.app, "root_path", "")
        if isinstance(root, str) and root:
            asked["root_path"] = root
        try:
            path = self._reached(self.app.routes, asked, "", skipped)
        except Exception:  # the framework raises it too, or does not come so far
            log.debug("the route of %r cannot be asked", scope["path"], exc_info=True)
            return NO_VIEW
        return NO_VIEW if path is None else self.written.row(path, methods)

    def _reached(self, routes: list[Any], scope: dict[str, Any], before: str, skipped: frozenset[int]) -> str | None:
        """The route that is served, as it is written; None where none is. ``scope`` becomes the route's."""
        for route in routes:
            if id(route) in skipped:
                continue
            match, child = route.matches(scope)
            if match.value != _FULL:
                continue
            scope.update(child)
            while hasattr(route, "effective_candidates"):
                _, child, inner, context = route._match(scope)  # noqa: SLF001 - FastAPI has no other way to ask it
                scope.update(child)
                route = getattr(context, "starlette_route", None) or context or inner  # noqa: PLW2901
            path: str = before + getattr(route, "path", "")
            nested = getattr(route, "routes", None)
            if isinstance(nested, list) and nested:
                root = _root_path_of(route)
                if root:
                    scope["root_path"] = root
                return self._reached(nested, scope, path, skipped)
            is_mount = hasattr(route, "app") and not hasattr(route, "endpoint")
            return f"{path}/{{path:path}}" if is_mount else path
        return None


def _texts(endpoint: Endpoint) -> list[str]:
    """The texts around the parameters of a route. A path that does not have them is not the route's."""
    path = endpoint.path
    if not path:
        return ["", ""]
    if endpoint.moved is not None:
        path = path[: endpoint.moved] + "{path}"
    elif endpoint.is_mount and endpoint.are_paths is None:
        path = path[: -len("/{path:path}")] + "{path}"
    return _STARLETTES.sub("\0", path).split("\0")


def _takes(endpoint: Endpoint, scope: Scope) -> bool:
    """Whether a route whose pattern matches the path serves the request."""
    if endpoint.is_mount:
        return True
    if scope["type"] == "websocket":
        return is_websocket(endpoint.route)
    return not is_websocket(endpoint.route) and (endpoint.methods is None or scope["method"] in endpoint.methods)


def _is_steep(path: str) -> bool:
    """Whether its regular expression takes more than linear time: two parameters that may share a text."""
    parameters = [found[2] for found in _STARLETTES.finditer(path)]
    between = _STARLETTES.split(path)[3:-1:3]
    return parameters.count("path") > 1 or any("/" not in text for text in between) or "path" in parameters[:-1]


# ---- Flask ------------------------------------------------------------------------------------------


class _Flask:
    """Flask: its own adapter knows of hosts, subdomains, and what werkzeug makes of slashes and methods."""

    def __init__(self, app: Any, rows: Sequence[Row]) -> None:
        self.app = app
        self.rows = rows
        self.written = Written(rows, _FLASKS, 1, 2)

    def special(self) -> list[int]:
        return self.written.special(self.rows, (rule.rule for rule in self.app.url_map.iter_rules()))

    def ask(self, environ: Scope, methods: list[str | None], _candidates: list[int] | None) -> int:
        """See ``RouteTable.attach``."""
        try:
            adapter = self.app.create_url_adapter(self.app.request_class(dict(environ)))
            rule, _ = adapter.match(return_rule=True)
        except Exception:  # noqa: BLE001 - what Flask answers: no route, another method, a redirection
            return NO_VIEW
        return self.written.row(rule.rule, methods)


# ---- Django -----------------------------------------------------------------------------------------


class Django:
    """Django's resolver, in the language that the path names: ``LocaleMiddleware`` comes later than we do."""

    def __init__(self, rows: Sequence[Row]) -> None:
        from django.conf import settings  # noqa: PLC0415 - Django is not everybody's
        from django.urls import get_resolver  # noqa: PLC0415
        from django.utils import translation  # noqa: PLC0415

        self._resolver, self._settings, self._translation = get_resolver(), settings, translation
        self.rows = rows
        self.written = Written(rows, _FLASKS, 1, 2)

    def special(self) -> list[int]:
        paths = set[str]()
        languages = [language for language, _ in self._settings.LANGUAGES] if self._settings.USE_I18N else [None]
        for language in languages:
            with self._translation.override(language):
                paths.update(_of_django(self._resolver.url_patterns, ""))
        return self.written.special(self.rows, paths)

    def ask(self, meta: Scope, methods: list[str | None], _candidates: list[int] | None) -> int:
        """See ``RouteTable.attach``."""
        path: str = meta[DJANGO_PATH]
        try:
            if self._settings.USE_I18N:
                language = self._translation.get_language_from_path(path) or self._settings.LANGUAGE_CODE
                with self._translation.override(language):
                    route = self._resolver.resolve(path).route
            else:
                route = self._resolver.resolve(path).route
        except Exception:  # noqa: BLE001 - Resolver404, or what a converter raises
            return NO_VIEW
        return self.written.row(route, methods)


DJANGO_PATH: Final = "ctxalloc.path_info"
"""Where ``django.py`` puts the path that Django resolves: that of META is not decoded."""


def _of_django(patterns: Iterable[Any], before: str) -> Iterator[str]:
    for pattern in patterns:
        path = before + str(pattern.pattern)
        nested = getattr(pattern, "url_patterns", None)
        if nested is None:
            yield path
        else:
            yield from _of_django(nested, path)


def note_what_frameworks_answer() -> None:
    """Have Django and Quart tell the request of a refusal that they answer: with 500, when it is handled no more."""
    signals: Any = sys.modules.get("django.core.signals")
    if signals is not None:
        signals.got_request_exception.connect(note_refusal)  # again is as once
    signals = sys.modules.get("quart.signals")
    if signals is not None:
        signals.got_request_exception.connect(_note_refusal_of_quart)


def note_refusal(*_: object, **__: object) -> None:
    """The receiver of a framework's ``got_request_exception``: the exception is being handled, with a 500."""
    here, error = SERVING.get(), sys.exception()
    if here is not None and error is not None:
        here.note_answered(here.refusal_of(error))


async def _note_refusal_of_quart(*_: object, **__: object) -> None:
    """The same: Quart would call a function in a thread."""
    note_refusal()
