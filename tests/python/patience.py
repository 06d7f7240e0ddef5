"""How long a test waits for what must come before it says that it will not: hangs become failures. Nothing is timed."""

import threading
import time
from collections.abc import Callable

SECONDS = 60.0


def wait_for(event: threading.Event, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait for an event of another thread; `meanwhile` is repeated."""
    until = time.monotonic() + SECONDS
    while not event.wait(0.001):
        meanwhile()
        assert time.monotonic() < until, "what the test waits for did not come"
