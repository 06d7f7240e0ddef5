"""Which handler serves which route: a plain table, and the ways to change it.

A handler is known here by its name only, so any that is registered can be put into the table. Names are checked before
anything starts. Neighbours: ``app`` selects by the table, ``demo`` and ``server`` take changes from the command line.
"""

import argparse
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import ctxalloc

HANDLERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/thumbnail": "aligned64",
        "/blur": "system",
        "/sharpen": "aligned64",
        "/edges": "aligned4096",
        "/equalize": "pool",
        "/denoise": "system",
        "/stats": "default_allocator",
    }
)
"""Route -> handler. ``default_allocator`` is NumPy's own."""

SCRATCH: Final = "pool"
"""Where the routes with much intermediate work put it: a scope within the request's scope."""

ENVIRONMENT: Final = "CTXALLOC_SERVICE_ROUTES"
"""Changes to the table, as on the command line: ``/blur=system,/edges=aligned64`` or ``*=system``."""


class RouteError(ValueError):
    """The table would name a route or a handler that does not exist."""


@dataclass(frozen=True)
class Table:
    """What is configured: a handler for each route, and one for scratch."""

    handlers: Mapping[str, str]
    scratch: str

    def options(self) -> list[str]:
        """The command line that makes this table from the one above."""
        routes = [f"--route={route}={handler}" for route, handler in self.handlers.items()]
        return [*routes, f"--scratch={self.scratch}"]


def register_handlers() -> None:
    """Put into ctxalloc's table what this service has beside the handlers that are always there."""
    if "aligned4096" not in {handler.name for handler in ctxalloc.handlers()}:
        ctxalloc.register("aligned4096", ctxalloc.strategies.Aligned(align=4096))


def changed(changes: Iterable[str], *, scratch: str = SCRATCH) -> Table:
    """The table with changes of the form ``ROUTE=HANDLER`` made, in order; ``*`` is every route.

    RouteError: no such route or handler, or a change of another form.
    """
    handlers = dict(HANDLERS)
    for change in changes:
        route, equals, name = change.strip().partition("=")
        if not (route and equals and name):
            raise RouteError(f"{change!r} does not say ROUTE=HANDLER; write for example /blur=system or *=system")
        if route != "*" and route not in HANDLERS:
            raise RouteError(f"there is no route {route!r}; the routes are {', '.join(HANDLERS)}, and * for all")
        handlers.update(dict.fromkeys(HANDLERS, name) if route == "*" else {route: name})
    for name in {*handlers.values(), scratch}:
        _known(name)
    return Table(MappingProxyType(handlers), scratch)


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--route`` and ``--scratch``."""
    parser.add_argument(
        "--route",
        action="append",
        default=[],
        metavar="ROUTE=HANDLER",
        help=f"the handler of a route (* is every route); may be repeated, and comes after ${ENVIRONMENT}",
    )
    parser.add_argument("--scratch", default=SCRATCH, metavar="HANDLER", help="for intermediate work (%(default)s)")


def from_options(options: argparse.Namespace) -> Table:
    """The table that the environment and a parsed command line ask for. RouteError as in ``changed``."""
    register_handlers()
    environment = [change for change in os.environ.get(ENVIRONMENT, "").split(",") if change.strip()]
    return changed([*environment, *options.route], scratch=options.scratch)


def _known(name: str) -> None:
    try:
        ctxalloc.handler(name)
    except ctxalloc.UnknownHandlerError as error:
        names = ", ".join(handler.name for handler in ctxalloc.handlers())
        raise RouteError(f"there is no handler {name!r}; registered are {names}") from error
