"""Ctrl-C before the command, or the program that it runs, has begun: one line, and 130 as shells have it.

Imported by ``_own_path`` where the process is the command's, before all that takes time. ``is_over`` ends it.
"""

import contextlib
import os
import signal
import sys

TYPE_CHECKING = False  # as in `_own_path`
if TYPE_CHECKING:
    from collections.abc import Callable

undo: "list[Callable[[], object]]" = []
"""What takes back what was made until now, called in the reverse order."""


def _end(*_: object) -> None:
    """The handler: no exception, since whatever is imported might catch it."""
    for step in reversed(undo):
        step()
    with contextlib.suppress(OSError, AttributeError):  # it is closed, or there is none
        print("ctxalloc: interrupted before it began", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


def begin() -> None:
    """Unless it is ignored, as in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def is_over() -> None:
    """From here on Ctrl-C is KeyboardInterrupt."""
    undo.clear()
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
