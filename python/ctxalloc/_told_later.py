"""What ``on_end`` is given where it is called after the loop's turn: nothing that could keep a request's arrays alive.

While it waits it holds a scope and a Context. Had these what the request has put into ``request.state`` or into a
ContextVar, that would be alive because of the wait, and be reported as an escape. So they have what was there before
the request, and of what it has set only values that hold nothing else. Neighbour: ``_serving``, which waits.
"""

import contextvars
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ctxalloc._choices import Scope

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN_MODULES: Final = frozenset({"datetime", "decimal", "ipaddress", "uuid"})
"""Whose objects are values too."""


class Before(NamedTuple):
    """What was there when the request began."""

    context: contextvars.Context
    state: dict[str, Any] | None

    @classmethod
    def of(cls, scope: Scope | None) -> "Before":
        """Taken in the Context that the request is served in."""
        state = None if scope is None else scope.get("state")
        return cls(contextvars.copy_context(), dict(state) if isinstance(state, Mapping) else None)

    def scope_of(self, scope: Scope) -> Scope:
        """The scope, with the ``state`` that may be kept."""
        state = scope.get("state")
        if not isinstance(state, Mapping):
            return scope
        return {**scope, "state": _kept(state, self.state or {})}

    def context_now(self) -> contextvars.Context:
        """Of the variables of the running Context those that may be kept."""
        context = contextvars.Context()
        for variable, value in _kept(contextvars.copy_context(), self.context).items():
            context.run(variable.set, value)
        return context


def runs_a_loop() -> bool:
    """Whether an event loop of asyncio's kind runs on this thread: where none does, nothing waits."""
    events: Any = sys.modules.get("asyncio.events")
    return events is not None and events._get_running_loop() is not None  # noqa: SLF001 - as asyncio's own


def _kept(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in now.items() if is_plain(value) or before.get(key, now) is value}


def is_plain(value: object) -> bool:
    """Whether a value holds nothing but itself."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(type(one) in _PLAIN for one in value)  # type: ignore[attr-defined] # as its type says
    return kind in _PLAIN or kind.__module__ in _PLAIN_MODULES
