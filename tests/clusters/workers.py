"""What the tests of Dask's workers ask of them and wait for."""

import time
from collections.abc import Callable
from typing import Any

from ctxalloc.dask import report


def until(holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait for what another process does by itself; it fails with ``what``, and asserts on no time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def in_use(client: Any) -> int:
    """What is charged to the budgets of all workers."""
    return sum(one.budget.in_use_bytes for one in client.run(report).values())
