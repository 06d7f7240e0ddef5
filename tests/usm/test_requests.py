"""Requests and budgets around USM arrays: limits hold for memory of a device too, and what is freed is given back."""

import asyncio

import numpy as np
import pytest

import ctxalloc
from ctxalloc import KiB, MiB, usm


def test_a_request_counts_an_array_and_gets_it_back(kind: str) -> None:
    with ctxalloc.request() as request:
        before = request.stats.live_bytes
        array = usm.zeros(100, np.float64, kind=kind)
        assert request.stats.live_bytes - before == 800
        view = array[::2]
        del array
        assert request.stats.live_bytes - before == 800, "the view keeps it"
        del view
        assert request.stats.live_bytes == before


def test_a_request_refuses_what_is_over_its_limit(kind: str) -> None:
    with ctxalloc.request(limit_bytes=1 * MiB, name="small") as request:
        array = usm.empty(512 * KiB, np.uint8, kind=kind)
        for make in (usm.empty, usm.zeros):
            with pytest.raises(MemoryError, match="small"):
                make(1 * MiB, np.uint8, kind=kind)
        with pytest.raises(MemoryError, match="small"):
            usm.asarray(array[::-1], copy=True).copy_to(kind=kind)
        assert request.stats.refused >= 3
        with pytest.raises(MemoryError):
            np.empty(1 * MiB, np.uint8)
        del array
        assert usm.empty(1000 * KiB, np.uint8, kind=kind).size == 1000 * KiB


def test_budgets_hold_for_arrays_and_an_escape_stays_charged(kind: str) -> None:
    budget = ctxalloc.Budget(1 * MiB, name="tenant")
    with ctxalloc.request(budget=budget):
        kept = usm.empty(1000, np.uint8, kind=kind)
    assert budget.in_use_bytes == 1000
    with ctxalloc.request(budget=budget), pytest.raises(MemoryError, match="tenant"):
        usm.empty(1 * MiB, np.uint8, kind=kind)
    del kept
    assert budget.in_use_bytes == 0


def test_tasks_are_charged_to_their_own_request() -> None:
    async def work(count: int) -> int:
        async with ctxalloc.request() as request:
            before = request.stats.live_bytes
            array = usm.empty(count, np.uint8, kind="device")
            await asyncio.sleep(0)
            assert array.size == count
            return request.stats.live_bytes - before

    async def main() -> list[int]:
        return await asyncio.gather(*(work(count) for count in (100, 200, 300)))

    assert asyncio.run(main()) == [100, 200, 300]


def test_a_copy_at_the_limit_needs_no_charge() -> None:
    device = usm.zeros(4 * MiB, np.uint8, kind="device")
    host = np.ones(2 * MiB, np.uint8)
    with ctxalloc.request(limit_bytes=64 * KiB):
        usm.copy(device[::2], host)
        usm.copy(host, device[::2])
    assert host.all()
