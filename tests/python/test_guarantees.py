"""Budgets that are guaranteed memory, and what arbitrates between those that want more than there is."""

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from rooms import until, wanting

import ctxalloc

pytestmark = pytest.mark.any_numpy


def test_a_guarantee_that_does_not_fit_says_what_does_not():
    process = ctxalloc.Budget(1000, name="process")
    first = ctxalloc.Budget(parent=process, guarantee_bytes=700)
    with pytest.raises(ValueError, match=r"'process' cannot guarantee 301 bytes more .*: 700 of its 1000"):
        ctxalloc.Budget(parent=process, guarantee_bytes=301)
    with ctxalloc.request(root=True, budget=process, reserve_bytes=250):
        with pytest.raises(ctxalloc.NoRoom) as busy:
            first.guarantee_bytes = 800
        assert (busy.value.reason, busy.value.budget_id, first.guarantee_bytes) == ("busy", process.id, 700)
    first.guarantee_bytes = 800
    assert process.reserved_bytes == 800
    with pytest.raises(ctxalloc.NoRoom, match=r"of its 1000, 800 are guaranteed to others") as never:
        ctxalloc.request(root=True, budget=process, reserve_bytes=201).__enter__()
    assert (never.value.never_fits, never.value.guaranteed_bytes) == (True, 800)
    assert pickle.loads(pickle.dumps(never.value)).guaranteed_bytes == 800
    for arguments in ({"guarantee_bytes": 1}, {"limit_bytes": 1, "parent": process, "guarantee_bytes": 2}):
        with pytest.raises(ValueError, match="guarantee_bytes"):
            ctxalloc.Budget(**arguments)
    with pytest.raises(ValueError, match="made with a guarantee"):
        ctxalloc.Budget(parent=process).guarantee_bytes = 1
    for wrong in ("much", True, None):
        with pytest.raises(TypeError, match="guarantee_bytes"):
            first.guarantee_bytes = wrong


def fill(budget, size_bytes):
    """An array that is charged to a budget, made by a request that has ended."""
    with ctxalloc.request(root=True, budget=budget):
        return np.zeros(size_bytes, "u1")


def test_who_waits_gets_what_a_reclaimer_gives_back():
    process = ctxalloc.Budget(100_000, name="process")
    cache, asked = [fill(process, 90_000)], []

    def drop(wanted_bytes):
        asked.append((wanted_bytes, threading.current_thread() is threading.main_thread()))
        cache.clear()

    reclaimer = process.add_reclaimer(drop)
    with wanting(process, 60_000):
        assert asked == [(50_000, False)]

    async def main():
        cache.append(fill(process, 100_000))
        async with wanting(process, 1000):
            return asked[1]

    assert asyncio.run(main()) == (1000, False)
    cache.append(fill(process, 5000))
    assert (process.reclaim(1), process.reclaim(1)) == (5000, 0)
    assert asked[2] == (1, True)
    assert (reclaimer.remove(), reclaimer.remove()) == (True, False)
    assert process.reclaim(1) == 0


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_a_reclaimer_that_fails_is_reported_and_passed_over(monkeypatch):
    process = ctxalloc.Budget(100_000, name="process")
    cache, raised = [fill(process, 90_000)], []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: raised.append((told.exc_type, told.object)))

    def fails(wanted_bytes):
        raise KeyError(wanted_bytes)

    process.add_reclaimer(fails, order=-1)
    process.add_reclaimer(lambda wanted_bytes: None)
    process.add_reclaimer(lambda wanted_bytes: cache.clear(), order=2**31 - 1)
    with pytest.warns(RuntimeWarning, match="'process' was asked for memory, and nothing"):
        assert process.reclaim(1) == 90_000
    assert raised == [(KeyError, fails)]
    for wrong in ("x", True):
        with pytest.raises(TypeError, match="order"):
            process.add_reclaimer(fails, order=wrong)
        with pytest.raises(TypeError, match="wanted_bytes"):
            process.reclaim(wrong)
    with pytest.raises(TypeError, match="add_reclaimer"):
        process.add_reclaimer("cache")


def test_the_largest_is_chosen_for_one_that_waits():
    process = ctxalloc.Budget(100_000, name="process", victims_after=0)
    assert (process.victims_after, ctxalloc.Budget().victims_after) == (0.0, None)
    kept, out = [], []

    def patient():
        with wanting(process, 50_000, name="patient", timeout=20):
            out.append("admitted")

    thread = threading.Thread(target=patient)

    def large():
        with ctxalloc.request(root=True, budget=process, name="large"):
            kept.append(np.zeros(90_000, "u1"))
            thread.start()
            until(lambda: process.victims)
            kept.append(np.zeros(2000, "u1"))

    with pytest.raises(ctxalloc.BudgetExceeded) as told:
        large()
    assert told.value.chosen_for == "request 'patient', which waits for 50000 bytes of 'process'"
    assert (told.value.budget_id, told.value.never_fits, told.value.of_request) == (process.id, False, False)
    assert str(told.value) == str(pickle.loads(pickle.dumps(told.value)))
    assert "holds 90000 bytes of it was chosen to make room for request 'patient'" in str(told.value)
    kept.clear()
    thread.join(20)
    assert (out, process.in_use_bytes, process.reserved_bytes) == (["admitted"], 0, 0)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="victims_after"):
            process.victims_after = wrong


async def told_when_chosen(process, victim):
    """What a task is told that is chosen to make room for another one."""

    async def tells():
        # An exception that is kept keeps the frames that it came through, and so the array.
        try:
            await victim(entered)
        except ctxalloc.BudgetExceeded as told:
            return str(told), type(told.__cause__), asyncio.current_task().cancelling()

    entered = asyncio.Event()
    task = asyncio.create_task(tells())
    await entered.wait()
    async with wanting(process, 50_000, timeout=20):
        pass
    return await task


def test_the_task_of_one_that_is_chosen_is_cancelled():
    process = ctxalloc.Budget(100_000, name="process", victims_after=0)

    async def idles(entered):
        async with ctxalloc.request(root=True, budget=process, cancel_if_chosen=True):
            kept = np.zeros(90_000, "u1")
            entered.set()
            await asyncio.Event().wait()
            return kept

    async def main():
        text, cause, others = await told_when_chosen(process, idles)
        assert "was chosen to make room for" in text
        assert (cause, others) == (asyncio.CancelledError, 0)

        # One that somebody else cancels is cancelled.
        entered = asyncio.Event()
        task = asyncio.create_task(idles(entered))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with pytest.raises(RuntimeError, match="no task of asyncio"), ctxalloc.request(cancel_if_chosen=True):
        pass
    assert process.in_use_bytes == 0


def test_what_a_chosen_one_left_in_a_cycle_makes_room():
    process = ctxalloc.Budget(100_000, victims_after=0)

    async def idles(entered):
        async with ctxalloc.request(root=True, budget=process, cancel_if_chosen=True):
            cycle = [np.zeros(90_000, "u1")]
            cycle.append(cycle)  # as asyncio.TaskGroup keeps its errors, with their frames
            entered.set()
            await asyncio.Event().wait()

    gc.disable()
    try:
        text, _, _ = asyncio.run(told_when_chosen(process, idles))
    finally:
        gc.enable()
    assert "was chosen to make room for" in text
    assert process.in_use_bytes == 0


def test_a_task_that_has_left_its_request_is_not_cancelled():
    process = ctxalloc.Budget(100_000, victims_after=0)

    def waits_for_room():
        with wanting(process, 50_000, timeout=20):
            pass

    async def main():
        async with ctxalloc.request(root=True, budget=process, cancel_if_chosen=True):
            kept = np.zeros(90_000, "u1")
            waits = threading.Thread(target=waits_for_room)
            waits.start()
            until(lambda: process.victims)  # the loop stands still: the cancellation waits for it
        await asyncio.sleep(0)
        del kept
        await asyncio.to_thread(waits.join, 20)

    asyncio.run(main())
    assert process.reserved_bytes == 0


EXIT = """
import ctxalloc, numpy, threading
process = ctxalloc.Budget(100_000, victims_after=0)
kept = []
with ctxalloc.request(root=True, budget=process):
    kept.append(numpy.zeros(90_000, "u1"))
called = threading.Event()
def slow(wanted_bytes):
    called.set()
    threading.Event().wait(0.2)
process.add_reclaimer(slow)
waits = ctxalloc.request(root=True, budget=process, reserve_bytes=50_000)
threading.Thread(target=waits.__enter__, daemon=True).start()
assert called.wait(20)
print("exits")
"""


def test_python_exits_while_a_reclaimer_runs_and_somebody_waits():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXIT], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "exits\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_fork_has_its_reclaimers_called():
    process = ctxalloc.Budget(100_000)
    cache = [fill(process, 90_000)]
    process.add_reclaimer(lambda wanted_bytes: cache.clear())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with wanting(process, 60_000, timeout=20):
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.in_use_bytes == 90_000
