"""Waiting for room under gevent and trio: nobody's loop stands still."""

import threading
from typing import Any

import pytest
import subprocesses

import ctxalloc

pytestmark = pytest.mark.any_numpy

trio: Any = pytest.importorskip("trio")
pytest.importorskip("gevent")

GEVENT = """
import gevent, threading, time
import ctxalloc
budget = ctxalloc.Budget(1000, name="b")
def wanting(**terms):
    return ctxalloc.request(budget=budget, reserve_bytes=600, root=True, **terms)
def is_as_new():
    return (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)
def until(condition):
    with gevent.Timeout(20):
        while not condition():
            gevent.sleep(0.001)
"""
PATCHED = f"from gevent import monkey; monkey.patch_all(){GEVENT}"


@pytest.mark.parametrize("head", [PATCHED, GEVENT], ids=["patched", "only its greenlets"])
def test_a_greenlet_that_waits_lets_the_others_run(head: str) -> None:
    program = f"""{head}
ticks, order = [], []
def tick():
    while len(order) < 3:
        ticks.append(budget.waiting)
        gevent.sleep(0.001)
def work(number):
    with wanting():
        gevent.sleep(0.02)
        order.append(number)
ticking = gevent.spawn(tick)
working = [gevent.spawn(work, number) for number in range(3)]
with gevent.Timeout(20):
    gevent.joinall([ticking, *working])
assert order == [0, 1, 2] and max(ticks) == 2 and len(ticks) > 10, (order, ticks)
assert is_as_new()
print("as it must be")
"""
    assert subprocesses.says(program) == "as it must be"


def test_a_greenlet_is_woken_by_a_thread_of_the_system() -> None:
    program = f"""{PATCHED}
from gevent.monkey import get_original
start, sleep = get_original("_thread", "start_new_thread"), get_original("time", "sleep")
has_begun = []
def hold():
    with wanting():
        has_begun.append(1)
        while budget.waiting < 2:
            sleep(0.001)
for _ in range(20):
    start(hold, ())
    until(lambda: has_begun)
    def work():
        with gevent.Timeout(20):
            with wanting():
                return budget.reserved_bytes
    assert [one.get() for one in (gevent.spawn(work), gevent.spawn(work))] == [600, 600]
    has_begun.clear()
until(is_as_new)
print("as it must be")
"""
    assert subprocesses.says(program) == "as it must be"


def test_a_greenlet_that_is_killed_or_out_of_time_leaves_the_line() -> None:
    program = f"""{PATCHED}
def work(**terms):
    try:
        with wanting(**terms):
            return "in"
    except ctxalloc.NoRoom as error:
        return error.reason
def impatient():
    with gevent.Timeout(0.02, False):
        return work()
    return "gave up"
with wanting():
    killed, refused, left, last = (
        gevent.spawn(work), gevent.spawn(work, timeout=0.01), gevent.spawn(impatient), gevent.spawn(work))
    until(lambda: budget.waiting == 4)
    killed.kill()
    assert isinstance(killed.value, gevent.GreenletExit) and budget.waiting == 3
    assert "time" in refused.get(timeout=20)
    assert left.get(timeout=20) == "gave up"
    assert budget.waiting == 1
assert last.get(timeout=20) == "in"
assert is_as_new()
# One whose turn has come, and that is killed before it knows.
with wanting():
    first, second = gevent.spawn(work), gevent.spawn(work)
    until(lambda: budget.waiting == 2)
until(lambda: budget.waiting == 1 or second.ready())
first.kill()
assert second.get(timeout=20) == "in"
assert is_as_new()
print("as it must be")
"""
    assert subprocesses.says(program) == "as it must be"


def test_the_main_greenlet_waits_too() -> None:
    program = f"""{PATCHED}
def hold():
    with wanting():
        gevent.sleep(0.02)
holding = gevent.spawn(hold)
until(lambda: budget.reserved_bytes)
with wanting(timeout=20):
    assert holding.ready()
assert is_as_new()
print("as it must be")
"""
    assert subprocesses.says(program) == "as it must be"


def test_wsgi_waits_in_greenlets_and_tells_of_a_killed_one() -> None:
    program = f"""{PATCHED}
from ctxalloc import wsgi
from gevent.event import Event
reports, may_end = [], Event()
def app(environ, start_response):
    may_end.wait(20)
    start_response("200 OK", [])
    return [b"done"]
terms = ctxalloc.request(budget=budget, reserve_bytes=600)
service = wsgi.AllocatorMiddleware(
    app, routes={{"/": terms}}, on_end=lambda scope, report: reports.append((report.outcome, report.stats.peak_bytes)))
def call():
    said = []
    service({{"REQUEST_METHOD": "GET", "PATH_INFO": "/"}}, lambda *told: said.append(told[0]))
    return said
calls = [gevent.spawn(call) for _ in range(4)]
until(lambda: budget.waiting == 3)
calls[2].kill()
assert reports == [("cancelled", 0)], reports
may_end.set()
assert [calls[at].get(timeout=20) for at in (0, 1, 3)] == [["200 OK"]] * 3
assert [outcome for outcome, _ in reports[1:]] == ["completed"] * 3, reports
assert is_as_new()
print("as it must be")
"""
    assert subprocesses.says(program) == "as it must be"


def wanting(budget: ctxalloc.Budget) -> ctxalloc.Request:
    return ctxalloc.request(budget=budget, reserve_bytes=600, root=True)


def test_trio_is_told_where_to_wait() -> None:
    budget, order = ctxalloc.Budget(1000, name="b"), []

    def in_thread() -> None:
        with wanting(budget):
            order.append(budget.reserved_bytes)

    async def main() -> None:
        async with wanting(budget):  # there is room
            assert budget.reserved_bytes == 600
            with pytest.raises(RuntimeError, match=r"this thread runs trio.* `await trio.to_thread.run_sync"):
                wanting(budget).__enter__()
            with pytest.raises(RuntimeError, match=r"in tasks of asyncio only.* `await trio.to_thread.run_sync"):
                await wanting(budget).__aenter__()
            assert budget.waiting == 0
        async with trio.open_nursery() as nursery:
            with wanting_elsewhere(budget):
                for _ in range(3):
                    nursery.start_soon(trio.to_thread.run_sync, in_thread)
                while budget.waiting < 3:
                    await trio.sleep(0.001)

    trio.run(main)
    assert order == [600] * 3
    assert (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)


class wanting_elsewhere:  # noqa: N801 - reads as a function
    """Another thread has the room meanwhile."""

    def __init__(self, budget: ctxalloc.Budget) -> None:
        self.budget, self.may_end, self.has_begun = budget, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold)

    def hold(self) -> None:
        with wanting(self.budget):
            self.has_begun.set()
            assert self.may_end.wait(20)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.has_begun.wait(20)

    def __exit__(self, *_: object) -> None:
        self.may_end.set()
        self.thread.join(20)
