"""Waiting for room under gevent and trio: nobody's loop stands still."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import subprocesses

import ctxalloc
from ctxalloc import _room
from ctxalloc.asgi import AllocatorMiddleware

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


def test_a_greenlet_waits_beside_another_one_that_runs_an_event_loop() -> None:
    program = f"""{PATCHED}
import asyncio
done = []
async def refused():
    try:
        with wanting():
            pass
    except RuntimeError as error:
        assert "enter it with `async with`" in str(error), error
        done.append("refused")
async def main():
    while not budget.waiting:  # the greenlet is the first
        await asyncio.sleep(0.001)
    await refused()
    async with wanting(timeout=20):  # in the line behind the greenlet
        done.append("task")
    while len(done) < 3:
        await asyncio.sleep(0.001)
def work():
    asyncio._get_running_loop().get_debug()  # it is known on the whole thread
    with wanting(timeout=20):
        done.append("greenlet")
with wanting():
    served = gevent.spawn(asyncio.run, main())
    until(lambda: asyncio._get_running_loop() is not None)
    waiting = gevent.spawn(work)
    until(lambda: budget.waiting == 2)
gevent.joinall([served, waiting], timeout=20, raise_error=True)
assert done == ["refused", "greenlet", "task"], done
assert is_as_new()
print("as it must be")
"""
    assert subprocesses.says(program) == "as it must be"


def wanting(budget: ctxalloc.Budget) -> ctxalloc.Request:
    return ctxalloc.request(budget=budget, reserve_bytes=600, root=True)


def is_as_new(budget: ctxalloc.Budget) -> bool:
    return (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.001)


def test_trios_tasks_wait_in_order_beside_those_that_run() -> None:
    budget, order, ticks = ctxalloc.Budget(1000, name="b"), list[object](), list[int]()

    async def tick() -> None:
        while len(order) < 4:
            ticks.append(budget.waiting)
            await trio.sleep(0.001)

    async def work(number: int) -> None:
        async with wanting(budget) as mine:
            assert (budget.reserved_bytes, ctxalloc.current_request()) == (600, mine)
            order.append(number)

    def in_thread() -> None:
        with wanting(budget):
            order.append("thread")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with wanting_elsewhere(budget):
                nursery.start_soon(tick)
                for number in range(3):
                    nursery.start_soon(work, number)
                    await until(lambda: budget.waiting == number + 1)  # noqa: B023 - asked at once
                nursery.start_soon(trio.to_thread.run_sync, in_thread)
                await until(lambda: budget.waiting == 4 and ticks[-3:] == [4] * 3)

    trio.run(main)
    assert order == [0, 1, 2, "thread"]
    assert is_as_new(budget)


def test_trios_tasks_that_wait_in_vain_leave_the_line() -> None:
    budget, scopes = ctxalloc.Budget(1000, name="b"), list[Any]()

    async def cancelled() -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            async with wanting(budget):
                raise AssertionError("there is no room")

    async def main() -> None:
        with wanting_elsewhere(budget):
            with pytest.raises(ctxalloc.NoRoom, match="in time"):
                async with ctxalloc.request(budget=budget, reserve_bytes=600, root=True, timeout=0.01):
                    pass
            with trio.move_on_after(0.01) as scope:
                async with wanting(budget):
                    pass
            assert scope.cancelled_caught
            assert budget.waiting == 0
            with pytest.raises(RuntimeError, match=r"this thread runs trio.* enter it with `async with`"):
                wanting(budget).__enter__()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancelled)
                await until(lambda: budget.waiting == 1)
                (scope,) = scopes
                scope.cancel()
        async with wanting(budget):  # cancelled before it waits
            with trio.CancelScope() as scope:
                scope.cancel()
                async with wanting(budget):
                    raise AssertionError("there is no room")

    trio.run(main)
    assert is_as_new(budget)


def test_a_turn_that_comes_after_trios_end_is_the_next_ones() -> None:
    class Admission:
        has_left = False

        def leave(self) -> None:
            self.has_left = True

    async def main() -> Any:
        return trio.lowlevel.current_trio_token()

    token, turn, admission = trio.run(main), trio.CancelScope(), Admission()
    _room._TrioCall(token, turn, admission)()  # type: ignore[arg-type] - all that is asked of it
    assert admission.has_left


class Served:
    """A call of the middleware whose client says this, one after the other, and then stays."""

    def __init__(self, budget: ctxalloc.Budget, *says: dict[str, Any] | Exception) -> None:
        self.says, self.heard, self.answers, self.ends = list(says), list[Any](), list[int](), list[str]()
        self.budget, self.was_waiting = budget, 0
        terms = ctxalloc.request(budget=budget, reserve_bytes=600, timeout=20)
        self.app: Any = AllocatorMiddleware(self.work, default=terms, on_end=self.end)

    def end(self, _request: object, report: Any) -> None:
        self.ends.append(report.outcome)

    async def work(self, _scope: object, receive: Any, send: Any) -> None:
        try:
            while not self.heard or self.heard[-1].get("more_body"):
                self.heard.append(await receive())
        except OSError as error:
            self.heard.append(error)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive(self) -> dict[str, Any]:
        self.was_waiting = self.was_waiting or self.budget.waiting
        if not self.says:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def send(self, message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        self.answers.extend([message["status"]] if "status" in message else [])

    async def run(self) -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "scheme": "http"}
        await self.app(scope, self.receive, self.send)


PART: dict[str, Any] = {"type": "http.request", "body": b"a", "more_body": True}
LAST: dict[str, Any] = {"type": "http.request", "body": b"z", "more_body": False}
GONE: dict[str, Any] = {"type": "http.disconnect"}


def test_what_a_middleware_had_taken_when_the_turn_came_is_not_lost() -> None:
    """As Starlette's BaseHTTPMiddleware, which awaits something between the server's message and its own answer."""
    budget = ctxalloc.Budget(1000, name="b")
    served = Served(budget, PART, PART, LAST)
    server = served.receive

    async def main() -> None:
        has_taken, may_go_on = trio.Event(), trio.Event()

        async def receive() -> dict[str, Any]:
            message = await server()
            if len(served.says) == 1:  # the second part
                has_taken.set()
                await may_go_on.wait()
            return message

        served.receive = receive  # type: ignore[method-assign] - a middleware outside
        async with trio.open_nursery() as nursery:
            with wanting_elsewhere(budget):
                nursery.start_soon(served.run)
                await has_taken.wait()
            await until(lambda: served.heard == [PART])  # the turn came, and the application waits for more
            may_go_on.set()

    trio.run(main)
    assert (served.heard, served.ends, served.answers) == ([PART, PART, LAST], ["completed"], [200])
    assert is_as_new(budget)


def test_an_application_cancelled_in_receive_leaves_no_task_behind() -> None:
    budget = ctxalloc.Budget(1000, name="b")
    served = Served(budget, PART)  # and no more comes

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with wanting_elsewhere(budget):
                nursery.start_soon(served.run)
                await until(lambda: not served.says)
            await until(lambda: served.heard == [PART])
            nursery.cancel_scope.cancel()
        await until(lambda: trio.lowlevel.current_statistics().tasks_living == tasks)
        assert trio.lowlevel.current_statistics().tasks_living == tasks

    async def count() -> int:
        return int(trio.lowlevel.current_statistics().tasks_living)

    tasks = trio.run(count)
    trio.run(main)
    assert (served.ends, served.answers) == (["cancelled"], [])
    assert is_as_new(budget)


@pytest.mark.parametrize(
    ("says", "heard", "end"),
    [
        ([LAST], [LAST], "completed"),
        ([PART, PART, LAST], [PART, PART, LAST], "completed"),
        ([PART] * 100 + [LAST], [PART] * 100 + [LAST], "completed"),
        ([LAST, GONE], [], "disconnected"),
        ([PART, OSError("reset")], [PART, OSError], "completed"),
    ],
    ids=["one part", "parts", "more parts than are kept", "gone", "broken"],
)
def test_the_middleware_waits_in_trio_and_loses_nothing_of_the_body(says: Any, heard: Any, end: str) -> None:
    budget = ctxalloc.Budget(1000, name="b")
    served = Served(budget, *says)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with wanting_elsewhere(budget):
                nursery.start_soon(served.run)
                await until(lambda: len(served.says) in (0, 37))  # 64 KiB were heard, each part a KiB at least
                await until(lambda: budget.waiting == (end == "completed"))
                assert (served.was_waiting, served.heard) == (1, [])

    trio.run(main)
    assert [OSError if isinstance(one, OSError) else one for one in served.heard] == heard
    assert (served.ends, served.answers) == ([end], [200] if end == "completed" else [])
    assert is_as_new(budget)


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
