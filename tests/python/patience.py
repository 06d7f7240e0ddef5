"""A limit for waiting, so that a test that would hang fails instead. No test depends on how long anything takes."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 60.0


def wait_for(event: threading.Event, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait for an event that another thread sets, and call `meanwhile` again and again until then."""
    until = time.monotonic() + SECONDS
    while not event.wait(0.001):
        meanwhile()
        assert time.monotonic() < until, "the event was not set in time"


def attempts() -> Iterator[int]:
    """Numbers to ask again by, for as long as a test may wait: however fast the asking and slow the machine is."""
    until = time.monotonic() + SECONDS
    return itertools.takewhile(lambda _: time.monotonic() < until, itertools.count())
