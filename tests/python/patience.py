"""A limit for waiting, so that a test that would hang fails instead. No test depends on how long anything takes."""

import threading
import time
from collections.abc import Callable

SECONDS = 60.0


def wait_for(event: threading.Event, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait for an event that another thread sets, and call `meanwhile` again and again until then."""
    until = time.monotonic() + SECONDS
    while not event.wait(0.001):
        meanwhile()
        assert time.monotonic() < until, "the event was not set in time"
