"""Which trace a request belonged to: the last one of each size and name, for the exemplars of ``prometheus``.

Off until a Collector asks (``begin``): then Rust calls ``note`` at each request's end. Only spans of OpenTelemetry that
are sampled count, for others lead nowhere.
"""

import os
import threading
import time
from typing import Any, Final, NamedTuple

from ctxalloc import _native
from ctxalloc._buckets import step_of
from ctxalloc._optional import need

MAX_NAMES: Final = 130
"""As many as the counters have series; what comes under another name has no exemplar."""
_AGE_S: Final = 1.0
"""How long one stays before another takes its place: requests of the same size mostly ask for the time only."""


class Exemplar(NamedTuple):
    """A request that stands for others."""

    trace_id: str
    span_id: str
    value: int
    """Its peak in bytes."""
    time: float
    """When it ended, in seconds since 1970."""


class _Known:
    def __init__(self) -> None:
        self.by_size: dict[int, Exemplar] = {}
        """By the bucket of its peak, of four a doubling."""
        self.refused: Exemplar | None = None


_LOCK = threading.Lock()
_KNOWN: Final[dict[str, _Known]] = {}
_span: Any = None


def begin() -> None:
    """Note exemplars from now on. ModuleNotFoundError: ``opentelemetry-api`` is not installed."""
    global _span  # noqa: PLW0603 - looked up once
    _span = need("opentelemetry.trace", "Collector(exemplars=True)", "opentelemetry-api").get_current_span
    _native._note_ends(True)  # noqa: SLF001, FBT003 - made for this


def note(name: str | None, peak_bytes: int, *, is_refused: bool) -> None:
    """A request has ended in the running Context."""
    name, size, now = _series(name), step_of(peak_bytes), time.time()
    with _LOCK:
        known = _KNOWN.get(name)
        before = None if known is None else known.by_size.get(size)
        is_due = before is None or now - before.time >= _AGE_S
        if not (is_due or is_refused):
            return
        if known is None and len(_KNOWN) >= MAX_NAMES:
            return
    context = _span().get_span_context()  # code of others, so without the lock
    if not (context.is_valid and context.trace_flags.sampled):
        return
    found = Exemplar(f"{context.trace_id:032x}", f"{context.span_id:016x}", peak_bytes, now)
    with _LOCK:
        known = _KNOWN.setdefault(name, _Known())
        if is_due:
            known.by_size[size] = found
        if is_refused:
            known.refused = found


def _series(name: str | None) -> str:
    """The name of the series that counts it."""
    if not name:
        return "unnamed"
    return name.encode("utf-8", "replace")[:128].decode("utf-8", "ignore")


def between(name: str, low_bytes: float, high_bytes: float) -> Exemplar | None:
    """The last request of a name whose peak was above ``low_bytes`` and at most ``high_bytes``."""
    with _LOCK:
        known = _KNOWN.get(name)
        found = [] if known is None else [one for one in known.by_size.values() if low_bytes < one.value <= high_bytes]
    return max(found, key=lambda one: one.time, default=None)


def refused(name: str) -> Exemplar | None:
    """The last request of a name that was refused memory."""
    with _LOCK:
        known = _KNOWN.get(name)
        return None if known is None else known.refused


def _forget_the_parents() -> None:
    global _LOCK  # noqa: PLW0603 - its holder is not here
    _LOCK = threading.Lock()
    _KNOWN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
