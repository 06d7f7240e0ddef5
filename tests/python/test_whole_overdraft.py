"""What a whole request is told that was given more than its limit: BudgetExceeded at its next step."""

import importlib.util

import pytest
from whole_programs import check, needs_library

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(importlib.util.find_spec("orjson") is None, reason="orjson, which does not survive NULL"),
]

GREEDY = """
    import orjson
    text = orjson.dumps([{"a": n, "b": "x" * 50} for n in range(200_000)])
    def refused(work):
        try:
            work()
        except ctxalloc.BudgetExceeded as error:
            return error
        raise AssertionError("not refused")
"""


@needs_library
def test_the_call_that_took_too_much_raises_in_a_with_block():
    check(
        GREEDY
        + """
    after = []
    def work():
        with ctxalloc.request(whole=True, limit_bytes=12 * MiB):
            held = orjson.loads(text)
            for _ in range(10):
                after.append(1)
    error = refused(work)
    assert type(error) is ctxalloc.BudgetExceeded and error.limit_bytes == 12 * MiB, error
    assert not after, "the block went on"
    refused(work)
    assert sum(1 for _ in range(10**5)) == 10**5  # nothing is left pending
    """
    )


@needs_library
def test_what_a_limit_lacks_is_raised_though_its_traceback_has_no_room():
    """What took too much is there until the exception is handled; in one of thirty its frame is a sample."""
    check(
        GREEDY
        + """
    text = orjson.dumps([{"a": n, "b": "x" * 50} for n in range(8000)])
    names = ", ".join(f"name{n}" for n in range(50))
    exec(f"def parse({names}): return [orjson.loads(text)]")
    for _ in range(300):
        with ctxalloc.request(whole=True, limit_bytes=MiB) as request:
            try:
                parse(*range(50))
            except MemoryError as error:
                assert type(error) is ctxalloc.BudgetExceeded, repr(error)
            else:
                raise AssertionError("not refused")
    """
    )


@needs_library
def test_a_request_of_arrays_inside_raises_what_the_one_around_it_lacks():
    check(
        GREEDY
        + """
    seen = []
    def work():
        with ctxalloc.request(whole=True, limit_bytes=12 * MiB) as around:
            with ctxalloc.request(limit_bytes=100 * MiB) as inside:
                seen.extend((around, inside))
                held = orjson.loads(text)
                for _ in range(10):
                    seen.append(1)
    error = refused(work)
    assert type(error) is ctxalloc.BudgetExceeded and error.limit_bytes == 12 * MiB, error
    around, inside = seen  # the block went no further
    assert around.stats.whole.granted > 0 and inside.stats.refused == 0
    """
    )


@needs_library
def test_what_was_not_raised_is_taken_back_at_the_end_of_the_block():
    check(
        GREEDY
        + """
    for _ in range(20):
        def inner():
            with ctxalloc.request(whole=True, limit_bytes=12 * MiB):
                orjson.loads(text)
        refused(inner)
        n = 0
        for n in range(1000):
            n += len(str(n))
    """
    )


@needs_library
def test_a_coroutine_is_never_interrupted_outside_of_its_steps():
    check(
        GREEDY
        + """
    async def greedy():
        async with ctxalloc.request(whole=True, limit_bytes=12 * MiB):
            orjson.loads(text)
            await asyncio.sleep(0)
    async def other():
        for _ in range(200):
            await asyncio.sleep(0)
        return "whole"
    async def main():
        found = await asyncio.gather(greedy(), other(), greedy(), other(), return_exceptions=True)
        assert [type(one) for one in found] == [ctxalloc.BudgetExceeded, str] * 2, found
    asyncio.run(main())
    """
    )


@needs_library
@pytest.mark.skipif(importlib.util.find_spec("httpx") is None, reason="httpx")
def test_a_service_that_answers_after_an_overdraft_answers_413():
    check(
        GREEDY
        + """
    import httpx
    from ctxalloc.asgi import AllocatorMiddleware
    seen = []
    async def app(scope, receive, send):
        if scope["path"] == "/step":
            try:
                held = orjson.loads(text)
            except ctxalloc.BudgetExceeded:
                seen.append("at once")
                raise
        elif scope["path"] == "/task":
            async def child():
                orjson.loads(text)
            found = await asyncio.gather(child(), return_exceptions=True)
            assert type(found[0]) is ctxalloc.BudgetExceeded, found
            seen.append("in the child")
            raise found[0]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})
    terms = ctxalloc.request(whole=True, limit_bytes=12 * MiB)
    service = AllocatorMiddleware(app, default=terms)
    async def main():
        transport = httpx.ASGITransport(service)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in ("/step", "/task", "/step"):
                answer = await client.get(path)
                assert answer.status_code == 413, (path, answer.status_code)
                answer = await client.get("/fine")
                assert answer.status_code == 200, answer.status_code
    asyncio.run(main())
    assert seen == ["at once", "in the child", "at once"], seen
    """
    )


@needs_library
def test_a_coroutine_of_the_main_thread_is_told_at_once():
    """Also where its block began outside of it, and the loop's own code is the request's, which goes on."""
    check(
        GREEDY
        + """
    seen = []
    async def greedy():
        async with ctxalloc.request(whole=True, limit_bytes=12 * MiB):
            try:
                orjson.loads(text)
                seen.append("went on")
            except ctxalloc.BudgetExceeded:
                seen.append("told")
                raise
    assert type(refused(lambda: asyncio.run(greedy()))) is ctxalloc.BudgetExceeded
    async def part(number):
        await asyncio.sleep(0)
        if number == 3:
            orjson.loads(text)
        return number
    async def main():
        found = await asyncio.gather(*[part(number) for number in range(6)], return_exceptions=True)
        assert [type(one).__name__ for one in found] == ["int"] * 3 + ["BudgetExceeded"] + ["int"] * 2, found
        seen.append("gathered")
    for _ in range(20):
        with ctxalloc.request(whole=True, limit_bytes=12 * MiB):
            asyncio.run(main())
    assert seen == ["told"] + ["gathered"] * 20, seen
    """
    )


@pytest.mark.long
@needs_library
def test_a_lock_that_a_block_takes_is_free_after_the_block():
    """An `__enter__` in Python had it when the request was told, and what leaves it was not to be called yet."""
    check(
        """
    import contextlib, queue
    class Own:
        def __init__(self): self.lock = threading.Lock()
        def __enter__(self): self.lock.acquire()
        def __exit__(self, *error): self.release()
        def release(self):
            made = [(self,) for _ in range(9)]
            self.lock.release()
    @contextlib.contextmanager
    def inside(lock):
        with lock:
            yield
    def by_block(lock):
        with lock: pass
    def by_stack(lock):
        with contextlib.ExitStack() as stack: stack.enter_context(lock)
    def by_generator(lock):
        with inside(lock): pass
    def by_queue(lock):
        waiting = queue.Queue()
        waiting.mutex = lock
        waiting.qsize()
    uses = [(threading.Lock, use) for use in (by_block, by_stack, by_generator, by_queue)]
    uses += [(kind, by_block) for kind in (Own, threading.Condition, threading.Semaphore)]
    def free(lock):
        lock = getattr(lock, "lock", lock)
        taken = lock.acquire(timeout=5)
        lock.release()
        return taken
    for make, use in uses:
        for number in range(40):
            lock, held = make(), None
            try:
                with ctxalloc.request(whole=True, limit_bytes=1 + 1000 * number, root=True):
                    held = []
                    while True:
                        use(lock)
                        held.append((number,))
            except MemoryError:
                held = None
            found = []
            other = threading.Thread(target=lambda: found.append(free(lock)))
            other.start()
            other.join()
            assert found == [True], (make, use, number)
    """
    )
