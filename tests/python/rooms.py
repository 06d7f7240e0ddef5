"""What the tests of waiting for room have in common: who wants how much, and that nothing is left of it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import ctxalloc


def wanting(budget: ctxalloc.Budget, size: int = 1000, **terms: Any) -> ctxalloc.Request:
    """A request that waits until the budget has room for so many bytes."""
    return ctxalloc.request(budget=budget, reserve_bytes=size, root=True, **terms)


def is_as_new(budget: ctxalloc.Budget) -> bool:
    """Whether nobody uses it, has reserved any of it, or waits for it."""
    return (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


async def until_soon(condition: Callable[[], object]) -> None:
    """Let other tasks run until it holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it never came")
