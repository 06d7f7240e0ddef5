"""Who wakes those who wait, where a request ends; and waiters whose event loop is closed."""

import asyncio
import gc
import threading

import pytest
from rooms import is_as_new, until, wanting

import ctxalloc


def test_an_end_in_a_task_wakes_the_next_one_of_its_loop_without_a_thread():
    budget = ctxalloc.Budget(1000, name="b")
    entered = []

    async def work(number):
        async with wanting(budget, 600):
            entered.append(number)

    async def main():
        entered.clear()
        async with wanting(budget, 600):
            tasks = [asyncio.create_task(work(number)) for number in range(3)]
            await asyncio.sleep(0)
            assert budget.waiting == 3
        # Given in the end itself: the thread of the queue would have to come by first.
        assert (budget.waiting, budget.reserved_bytes) == (2, 600)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        is_at_once = entered[:1] == [0]
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert entered == [0, 1, 2]
        return is_at_once

    # That thread, which looks as it begins, may do so in this very moment.
    assert any(asyncio.run(main()) for _ in range(10))
    assert is_as_new(budget)


def test_an_end_on_a_thread_gives_its_room_at_once():
    budget = ctxalloc.Budget(1000, name="b")
    entered = threading.Event()

    def work():
        with wanting(budget, 600):
            entered.set()

    with wanting(budget, 600):
        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: budget.waiting == 1)
    assert budget.waiting == 0  # whoever waited has the room, and may not know it yet
    assert entered.wait(20)
    thread.join(20)
    assert is_as_new(budget)


@pytest.mark.parametrize("is_given_before", [False, True])
def test_a_waiter_of_a_closed_loop_that_is_kept_returns_its_room(is_given_before):
    budget = ctxalloc.Budget(1000, name="b")
    loop = asyncio.new_event_loop()

    async def work():
        async with wanting(budget, 800):
            pytest.fail("its loop is closed")

    first = wanting(budget, 500)
    with first:
        task = loop.create_task(work())
        loop.run_until_complete(asyncio.sleep(0))
        assert budget.waiting == 1
        if not is_given_before:
            loop.close()
    # Given now. Where the loop is not closed yet it is asked to go on, and never does.
    until(lambda: budget.waiting == 0)
    loop.close()
    until(lambda: budget.reserved_bytes == 0)
    assert not task.done()
    task._log_destroy_pending = False
    del task
    gc.collect()
    assert is_as_new(budget)


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_waiters_of_a_closed_loop_let_those_behind_them_pass(kind, is_kept):
    new_loop = asyncio.new_event_loop if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    budget, entered = ctxalloc.Budget(1000, name="b"), []
    closed, other = new_loop(), new_loop()

    async def work(name, size):
        async with wanting(budget, size):
            entered.append(name)

    def on_a_thread():
        with wanting(budget, 200):
            entered.append("thread")

    with wanting(budget, 500):
        never = [closed.create_task(work("never", 800)) for _ in range(3)]
        closed.run_until_complete(asyncio.sleep(0))
        behind = other.create_task(work("task", 300))
        other.run_until_complete(asyncio.sleep(0))
        thread = threading.Thread(target=on_a_thread)
        thread.start()
        until(lambda: budget.waiting == 5)
        assert entered == []  # there is room for both, and somebody stands before them
        closed.close()
        for task in never:
            task._log_destroy_pending = False
        kept = never if is_kept else []
        del task, never
        gc.collect()
        other.run_until_complete(asyncio.wait_for(behind, 5))
        thread.join(20)
        assert sorted(entered) == ["task", "thread"]
        assert (budget.waiting, budget.reserved_bytes) == (0, 500)
        assert not any(task.done() for task in kept)
    other.close()
    assert is_as_new(budget)
