"""How a request with a reservation is entered: at once where there is room; by hand, as loops drive coroutines."""

import asyncio
import collections.abc
import gc
import inspect
import pickle
import threading
import weakref

import pytest
from rooms import is_as_new, wanting

import ctxalloc


def result_of(coroutine):
    """What it returns without suspending."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def first_step(budget, loop):
    """The coroutine of one that waits, after its first step."""
    entering = wanting(budget).__aenter__()
    asyncio._set_running_loop(loop)
    try:
        assert asyncio.isfuture(entering.send(None))
    finally:
        asyncio._set_running_loop(None)
    assert budget.waiting == 1
    return entering


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_where_there_is_room_it_is_entered_without_a_future():
    budget = ctxalloc.Budget(1000, name="b")
    request = wanting(budget)
    entering = request.__aenter__()
    assert isinstance(entering, collections.abc.Coroutine)
    assert budget.reserved_bytes == 0, "nothing happens before it is awaited"
    assert result_of(entering) is request  # no event loop is there, which a future would need
    assert (budget.reserved_bytes, ctxalloc.current_request() == request) == (1000, True)
    with pytest.raises(RuntimeError, match="entered"):
        entering.send(None)
    assert result_of(request.__aexit__(None, None, None)) is None
    assert is_as_new(budget)
    assert ctxalloc.current_request() is None


def test_one_that_was_entered_is_not_entered_again():
    budget = ctxalloc.Budget(1000, name="b")
    request = wanting(budget, 400)
    with request:
        with pytest.raises(RuntimeError, match="is entered already"):
            request.__aenter__().send(None)
        assert budget.reserved_bytes == 400
    with pytest.raises(RuntimeError, match="was entered and left before"):
        request.__aenter__().send(None)
    assert is_as_new(budget)


def test_one_that_waits_is_closed_and_leaves(loop):
    budget = ctxalloc.Budget(1000, name="b")
    with wanting(budget):
        first_step(budget, loop).close()
        assert budget.waiting == 0
        entering = first_step(budget, loop)
        with pytest.raises(KeyError, match="thrown"):
            entering.throw(KeyError("thrown"))
        assert budget.waiting == 0
        entering = first_step(budget, loop)
        del entering
        gc.collect()
        assert budget.waiting == 0
    assert is_as_new(budget)


def test_what_is_thrown_before_it_begins_is_raised():
    budget = ctxalloc.Budget(1000, name="b")
    with pytest.raises(KeyError, match="thrown"):
        wanting(budget).__aenter__().throw(KeyError("thrown"))
    wanting(budget).__aenter__().close()
    assert is_as_new(budget)


def test_one_that_waits_and_refers_to_itself_is_collected(loop):
    budget = ctxalloc.Budget(1000, name="b")

    class Holds:
        entering = None

    with wanting(budget):
        holds = Holds()
        gone = weakref.ref(holds)

        async def wait(_held):
            async with wanting(budget):
                pytest.fail("there is no room")

        holds.entering = wait(holds)
        asyncio._set_running_loop(loop)
        try:
            holds.entering.send(None)
        finally:
            asyncio._set_running_loop(None)
        assert budget.waiting == 1
        del holds
        gc.collect()
        assert gone() is None
        assert budget.waiting == 0
    assert is_as_new(budget)


def in_thread(work):
    """What it returns in a thread of its own."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join(20)
    return answers[0]


def refused(budget, turns):
    """How many of so many `with` were refused in a task."""

    async def enter():
        refused = 0
        for _ in range(turns):
            try:
                with wanting(budget, 10):
                    pass
            except RuntimeError as error:
                assert "enter it with `async with`" in str(error)  # noqa: PT017 - counted
                refused += 1
        return refused

    return asyncio.run(enter())


def test_a_with_on_a_loops_thread_is_refused_though_there_is_room():
    budget = ctxalloc.Budget(1000, name="b")
    assert in_thread(lambda: refused(budget, 200)) == 200
    assert is_as_new(budget)


def test_a_thread_that_reserved_before_its_loop_began_hears_of_it_soon():
    budget = ctxalloc.Budget(1000, name="b")

    def work():
        for _ in range(1000):
            with wanting(budget, 10):
                pass
        passed = [100 - refused(budget, 100) for _ in range(2)]
        assert passed[0] < 16
        return passed[1]

    assert in_thread(work) == 0, "it asks each time again"
    assert is_as_new(budget)


def test_a_with_that_would_wait_on_a_loops_thread_is_always_refused():
    budget = ctxalloc.Budget(1000, name="b")

    def work():
        for _ in range(65):  # none of the next fifteen would be asked
            with wanting(budget, 10):
                pass
        with wanting(budget, 995):
            return refused(budget, 10)

    assert in_thread(work) == 10
    assert is_as_new(budget)


def test_options_are_read_however_they_are_given():
    name = "reserve_bytes"[:7] + "_bytes"  # made here: names of compiled code are interned
    terms = {name: 100, "timeout": 1.5, "limit_bytes": 200, "budget": None}
    budget = ctxalloc.Budget(1000, name="b")
    with ctxalloc.request(**(terms | {"budget": budget})):
        assert budget.reserved_bytes == 100
    for request in (ctxalloc.request(**terms), ctxalloc.request(reserve_bytes=100, timeout=1.5, limit_bytes=200)):
        assert (
            request.__reduce__()[0].keywords
            == ctxalloc.request(limit_bytes=200, reserve_bytes=100, timeout=1.5).__reduce__()[0].keywords
        )
    with pytest.raises(TypeError, match="unexpected keyword argument 'reserve'"):
        ctxalloc.request(reserve=1)
    with pytest.raises(TypeError, match="positional"):
        ctxalloc.request(1)
    with pytest.raises(TypeError, match="reserve_bytes=True"):
        ctxalloc.request(reserve_bytes=True)
    with pytest.raises(ValueError, match="reserve_bytes=-1"):
        ctxalloc.request(reserve_bytes=-1)
    with pytest.raises(ValueError, match=r"timeout=1\.0"):
        ctxalloc.request(timeout=1.0)


def test_the_function_is_what_it_says():
    assert list(inspect.signature(ctxalloc.request).parameters)[:3] == ["limit_bytes", "strategy", "name"]
    assert ctxalloc.request.__doc__.startswith("A request: memory, numbers and perhaps a limit")
    assert pickle.loads(pickle.dumps(ctxalloc.request)) is ctxalloc.request
