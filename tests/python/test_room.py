"""Waiting for room: ``request(reserve_bytes=..., timeout=...)`` in tasks and threads. Rust tests the queue itself."""

import asyncio
import gc
import os
import pickle
import signal
import threading

import numpy as np
import pytest
import subprocesses
from rooms import is_as_new, until, until_soon, wanting

import ctxalloc


@pytest.mark.parametrize("size", [300, 501])
def test_tasks_wait_in_line_and_are_woken(size):
    budget = ctxalloc.Budget(1000, name="b")
    order = []

    async def work(number, size):
        async with wanting(budget, size) as request:
            assert ctxalloc.current_request() == request
            order.append(number)
            assert budget.reserved_bytes <= 1000
            await asyncio.sleep(0)

    async def main():
        async with wanting(budget, 1000):
            tasks = [asyncio.create_task(work(number, size + number)) for number in range(20)]
            await until_soon(lambda: budget.waiting == 20)
            assert order == []
        await asyncio.wait_for(asyncio.gather(*tasks), 20)

    asyncio.run(main())
    # Of those that have room at the same time, each woken by whoever gave it room, any may run first.
    has_room_alone = 2 * size > 1000
    assert (order if has_room_alone else sorted(order)) == list(range(20))
    assert is_as_new(budget)


def test_a_thread_waits_without_the_gil():
    budget = ctxalloc.Budget(1000, name="b")
    entered = []

    def work():
        with wanting(budget, 800):
            entered.append(budget.reserved_bytes)

    with wanting(budget, 500):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: budget.waiting == 3)
        assert entered == []
    for thread in threads:
        thread.join(20)
    assert entered == [800] * 3
    assert is_as_new(budget)


def test_a_signal_interrupts_a_thread_that_waits():
    # In a process of its own: the signal is the process's, and a worker of the tests has had other handlers for it.
    printed = subprocesses.says(
        """
import signal, threading, time
import ctxalloc
# Whatever started the tests: a shell without job control has its background jobs ignore it, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
budget = ctxalloc.Budget(1000, name="b")
def wanting(size):
    return ctxalloc.request(budget=budget, reserve_bytes=size, root=True, timeout=60)
def interrupt():
    while budget.waiting != 1:
        time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
with wanting(500):
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with wanting(800):
            print("there was no room")
    except KeyboardInterrupt:
        print("interrupted", budget.waiting)
    thread.join()
print(budget.in_use_bytes, budget.reserved_bytes, budget.waiting)
"""
    )
    assert printed == "interrupted 0\n0 0 0"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer of the process")
def test_a_signal_is_heard_wherever_the_wait_stands():
    # Every 3 ms of a wait that looks for signals each 50 ms: before it, in its sleep, and between a look and a sleep.
    printed = subprocesses.says(
        """
import signal
import ctxalloc
class Rang(Exception):
    pass
def ring(number, frame):
    raise Rang
signal.signal(signal.SIGALRM, ring)
budget = ctxalloc.Budget(1000, name="b")
rang = 0
with ctxalloc.request(budget=budget, reserve_bytes=500, root=True):
    for number in range(1, 24):
        try:
            signal.setitimer(signal.ITIMER_REAL, number * 0.003)
            with ctxalloc.request(budget=budget, reserve_bytes=800, root=True, timeout=60):
                print("there was no room")
        except Rang:
            rang += 1
print(rang, budget.reserved_bytes, budget.waiting)
"""
    )
    assert printed == "23 0 0"


def test_a_thread_that_runs_an_event_loop_does_not_block():
    """Whatever ran in it before: after a thread's first 64 reservations only each sixteenth asks for a loop."""
    budget = ctxalloc.Budget(1000, name="b")

    def reserve(times):
        for _ in range(times):
            with wanting(budget, 1):
                pass

    async def main():
        with pytest.raises(RuntimeError, match="async with"):
            reserve(16)

    reserve(70)
    asyncio.run(main())
    assert is_as_new(budget)


def test_each_reason_is_told():
    budget = ctxalloc.Budget(1000, name="b")
    with pytest.raises(ctxalloc.NoRoom, match="can never be reserved") as never, wanting(budget, 1001):
        pass
    assert (never.value.reason, never.value.never_fits, never.value.budget_id) == ("never fits", True, budget.id)
    assert str(pickle.loads(pickle.dumps(never.value))) == str(never.value)
    with wanting(budget, 600):
        with pytest.raises(ctxalloc.NoRoom) as late, wanting(budget, 600, timeout=0.01):
            pass
        assert (late.value.reason, late.value.in_use_bytes) == ("timed out", 600)
        with wanting(budget, 400), ctxalloc.request(reserve_bytes=400):
            with pytest.raises(ctxalloc.NoRoom) as inside, ctxalloc.request(reserve_bytes=401):
                pass
            assert inside.value.reason == "inside of another"
    assert is_as_new(budget)


def test_a_loop_that_closes_with_waiters_leaves_nothing():
    budget = ctxalloc.Budget(1000, name="b")
    loop = asyncio.new_event_loop()

    async def work():
        async with wanting(budget, 800):
            pass

    with wanting(budget, 500):
        task = loop.create_task(work())
        loop.run_until_complete(asyncio.sleep(0))
        assert budget.waiting == 1
        loop.close()
        task._log_destroy_pending = False
        del task
        gc.collect()
        until(lambda: budget.waiting == 0)
    assert is_as_new(budget)


def test_a_decorated_function_reserves_for_each_call():
    budget = ctxalloc.Budget(1000, name="b")

    @wanting(budget, 700)
    def plain():
        return budget.reserved_bytes

    @wanting(budget, 700)
    async def awaited():
        await asyncio.sleep(0)
        return budget.reserved_bytes

    async def main():
        return await asyncio.wait_for(asyncio.gather(awaited(), awaited()), 20)

    assert plain() == 700
    assert asyncio.run(main()) == [700, 700]
    assert is_as_new(budget)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_fork_has_none_of_the_waiters_and_can_wait_itself():
    budget = ctxalloc.Budget(1000, name="b")

    def work():
        with wanting(budget, 800):
            pass

    outer = wanting(budget, 500)
    with outer:
        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: budget.waiting == 1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert budget.waiting == 0  # before anything has looked at the queue
                with pytest.raises(ctxalloc.NoRoom), wanting(budget, 600, timeout=0.05):
                    pass
                assert budget.waiting == 0
                with wanting(budget, 500):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert budget.waiting == 1
    thread.join(20)
    assert is_as_new(budget)


@pytest.mark.parametrize(
    ("terms", "error"),
    [
        ({"reserve_bytes": -1}, ValueError),
        ({"reserve_bytes": "much"}, TypeError),
        ({"reserve_bytes": True}, TypeError),
        ({"reserve_bytes": 1, "timeout": -1.0}, ValueError),
        ({"timeout": 1.0}, ValueError),
        ({"reserve_bytes": "auto"}, ValueError),
        ({"max_waiting": 1}, ValueError),
        ({"reserve_bytes": 1, "max_waiting": -1}, ValueError),
        ({"reserve_bytes": 1, "max_waiting": True}, TypeError),
    ],
)
def test_terms_of_waiting_that_are_none_are_refused(terms, error):
    with pytest.raises(error, match=r"request\(.*give"):
        ctxalloc.request(**terms)


def test_auto_reserves_what_its_name_needed_lately():
    budget = ctxalloc.Budget(100 * ctxalloc.MiB, name="b")
    terms = {"name": "auto in Python", "limit_bytes": 10 * ctxalloc.MiB, "root": True}
    for _ in range(10):
        with ctxalloc.request(budget=budget, reserve_bytes="auto", **terms):
            assert budget.reserved_bytes == 10 * ctxalloc.MiB
            assert np.ones(ctxalloc.MiB, np.uint8).all()
    with ctxalloc.request(budget=budget, reserve_bytes="auto", **terms):
        assert 1.2 * ctxalloc.MiB <= budget.reserved_bytes < 1.3 * ctxalloc.MiB
    assert is_as_new(budget)
    again = pickle.loads(pickle.dumps(ctxalloc.request(reserve_bytes="auto", max_waiting=3, **terms)))
    with again:
        pass


def test_a_name_has_no_more_waiters_than_its_terms_say():
    budget = ctxalloc.Budget(1000, name="b")

    async def work():
        async with wanting(budget, 600, name="crowded", max_waiting=1):
            pass

    async def main():
        async with wanting(budget, 600):
            waiting = asyncio.create_task(work())
            await until_soon(lambda: budget.waiting == 1)
            with pytest.raises(ctxalloc.NoRoom) as refused:
                await work()
            assert refused.value.reason == "queue is full"
            listed = [one for one in ctxalloc.metrics.waiting() if one.budget_id == budget.id]
            assert [(one.name, one.reserve_bytes, one.budget) for one in listed] == [("crowded", 600, "b")]
        await waiting

    asyncio.run(main())
    assert is_as_new(budget)
    series = ctxalloc.metrics.snapshot().series["crowded"]
    assert (series.waited_micros.count, series.timed_out, series.turned_away) == (1, 0, 1)


def test_a_budget_says_how_many_may_wait():
    budget = ctxalloc.Budget(1000, name="b")
    assert budget.max_waiting == 1024
    budget.max_waiting = 0
    with wanting(budget, 600), pytest.raises(ctxalloc.NoRoom, match="as many wait"), wanting(budget, 600):
        pass
    with pytest.raises(ValueError, match="max_waiting"):
        budget.max_waiting = -1
