"""What ``on_end`` is told of a request of a server. ``_serving`` makes it, for all middlewares."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from ctxalloc._choices import Scope
from ctxalloc._native import Escaped, Stats
from ctxalloc._sites import Sites

Outcome: TypeAlias = Literal["completed", "refused", "failed", "cancelled", "disconnected", "unfinished"]


class Report(NamedTuple):
    """How a request of the server ended, for ``on_end``."""

    route: str | None
    """The pattern of ``routes`` that matched, never the raw path; None where none did."""
    outcome: Outcome
    """``completed``: the whole answer was sent. ``refused``: a budget refused, and that ended it: it left the
    application, or a handler inside answered with 4xx or 5xx that asked ``ctxalloc.problems``, or that an ASGI
    framework calls in an ``except``. ``failed``: an exception, or an answer of 5xx, which is what frameworks make of
    one. ``cancelled``: its task was. ``disconnected``: the client went away first, as far as was seen by then.
    ``unfinished``: the application returned, or its body was closed, without a whole answer."""
    status: int | None
    """The status of the answer; None where no answer was begun."""
    seconds: float
    """From the beginning to the end of the account."""
    stats: Stats
    """The numbers at the end."""
    escaped: Escaped
    """What was alive at the end and outlives the request. What only asyncio's running step still holds is not in it:
    where something is alive at the end, ``on_end`` is called when the application's step ends, or a turn of the loop
    later; and where it still is alive then, up to 0.11 s later."""
    error: BaseException | None
    """The exception that ended it, if it came out of the application; a BudgetExceeded where the outcome is
    ``refused``. Its frames hold no arrays of the request."""
    sites: Sites | None = None
    """Which code made the arrays of its peak and those that have escaped, if it is one that ``sites=`` has chosen."""


OnEnd: TypeAlias = Callable[[Scope, Report], object]
