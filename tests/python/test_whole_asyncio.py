"""Whole requests at their limits on asyncio's event loop: a refusal ends its request, and nobody waits for ever."""

import importlib.util

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]

START = """
    told = []
    async def main(work, count):
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(context))
        for number in range(count):
            task = asyncio.create_task(work(number))
            _, waits = await asyncio.wait([task], timeout=20)
            assert not waits, f"{number} waits for ever: {told}"
            assert type(task.exception()) is ctxalloc.BudgetExceeded, task
        assert not told, told
"""


def test_a_task_that_fills_its_limit_between_steps_ends():
    """The refusal was the loop's own, which noted no next step."""
    check(
        START
        + """
    async def work(number):
        async with ctxalloc.request(whole=True, limit_bytes=MiB, root=True):
            held = []
            while True:
                held.append(" " * (300 + number))
                await asyncio.sleep(0)
    asyncio.run(main(work, 60))
    """
    )


def test_who_waits_for_a_request_at_its_limit_is_woken():
    """`gather` collects its results in a callback, and so does a TaskGroup; a future calls who waits for it."""
    check(
        START
        + """
    async def part(held, size):
        for _ in range(20):
            held.append(" " * size)
            await asyncio.sleep(0)
        return held
    async def gathers(number):
        async with ctxalloc.request(whole=True, limit_bytes=MiB, root=True):
            held = []
            while True:
                await asyncio.gather(*[part(held, 300 + number) for _ in range(5)])
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                waiter = asyncio.create_task(asyncio.wait_for(asyncio.shield(future), 60))
                await asyncio.sleep(0)
                future.set_result(" " * number)
                await waiter
                async with asyncio.timeout(60):
                    await asyncio.sleep(0.0001)
    asyncio.run(main(gathers, 30))
    async def groups(number):
        async with ctxalloc.request(whole=True, limit_bytes=MiB, root=True):
            held = []
            while True:
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(5):
                            group.create_task(part(held, 300 + number))
                except* MemoryError:
                    raise MemoryError from None
    asyncio.run(main(groups, 30))
    """
    )


def test_a_service_answers_whoever_fills_its_limit_between_steps():
    check(
        """
    from ctxalloc.asgi import AllocatorMiddleware
    async def app(scope, receive, send):
        rows = []
        for number in range(10**6):
            rows.append({"n": number, "text": " " * int(scope["path"][1:])})
            if number % 4 == 0:
                await asyncio.sleep(0)
    service = AllocatorMiddleware(app, default=ctxalloc.request(limit_bytes=MiB, whole=True))
    async def answered(number):
        answers = []
        async def send(message):
            answers.append(message.get("status"))
        async def receive():
            await asyncio.sleep(3600)
        scope = {"type": "http", "path": f"/{number}", "method": "GET", "headers": [], "query_string": b""}
        await asyncio.wait_for(service(scope, receive, send), 20)
        return answers[0]
    async def main():
        assert [await answered(300 + number) for number in range(40)] == [413] * 40
    asyncio.run(main())
    """
    )


@pytest.mark.skipif(importlib.util.find_spec("anyio") is None, reason="anyio")
def test_a_group_of_anyio_ends_with_its_request():
    """The callback that notes the end of one of its tasks is anyio's, in Python."""
    check(
        START
        + """
    import anyio
    async def part(held, size):
        for _ in range(20):
            held.append(" " * size)
            await anyio.sleep(0)
    async def work(number):
        async with ctxalloc.request(whole=True, limit_bytes=MiB, root=True):
            held = []
            while True:
                try:
                    async with anyio.create_task_group() as group:
                        for _ in range(5):
                            group.start_soon(part, held, 300 + number)
                except* MemoryError:
                    raise MemoryError from None
                with anyio.move_on_after(60):
                    await anyio.sleep(0.0001)
    asyncio.run(main(work, 60))
    """
    )


@pytest.mark.long
def test_a_loop_inside_of_a_request_on_another_thread_ends():
    """Its own code is the request's too, and an exception that is set for the thread would be raised there."""
    check(
        """
    async def part(held):
        for _ in range(20):
            held.append(" " * 311)
            await asyncio.sleep(0)
    async def groups(held):
        while True:
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(part(held))
    found = []
    def work():
        for _ in range(40):
            try:
                with ctxalloc.request(whole=True, limit_bytes=MiB // 4, root=True):
                    asyncio.run(groups([]))
            except* MemoryError:
                found.append(1)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(150)
    assert len(found) == 40, len(found)
    """
    )


def test_who_reads_a_process_at_its_limit_is_told():
    """The loop reads 256 KiB at once, and tried it again for ever where these were refused."""
    check(
        START
        + """
    async def work(number):
        async with ctxalloc.request(whole=True, limit_bytes=1 + 6000 * number, root=True):
            process = await asyncio.create_subprocess_exec("/bin/echo", "hello", stdout=-1)
            try:
                await process.communicate()
            finally:
                await process.wait()
    asyncio.run(main(work, 40))
    async def reads(number):
        process = await asyncio.create_subprocess_exec("head", "-c", "100M", "/dev/zero", stdout=-1)
        try:
            async with ctxalloc.request(whole=True, limit_bytes=2 * MiB, root=True) as request:
                await (process.communicate() if number else process.stdout.read())
        finally:
            seen.append(request.stats.peak_bytes)
            process.kill()
            process._transport.close()
    seen = []
    asyncio.run(main(reads, 2))
    assert max(seen) < 4 * MiB, seen
    """
    )


def test_what_the_standard_library_generates_is_not_broken_off():
    """A SelectorKey, a namedtuple, is made by a function in `<string>`: the selector had the file, its loop did not."""
    check(
        """
    import collections, traceback
    reader, writer = os.pipe()
    inner = collections.Counter()
    async def work(number):
        loop = asyncio.get_running_loop()
        async with ctxalloc.request(whole=True, limit_bytes=MiB, root=True):
            held = []
            while True:
                loop.add_reader(reader, print)
                held.append(loop._selector.get_key(reader))
                loop.remove_reader(reader)
                held.append(" " * (300 + number))
    async def main():
        for number in range(60):
            try:
                await work(number)
            except ctxalloc.BudgetExceeded as error:
                inner[traceback.extract_tb(error.__traceback__)[-1].name] += 1
    asyncio.run(main())
    assert inner == {"work": 60}, inner
    """
    )


def test_what_a_loop_calls_of_cs_has_a_limit() -> None:
    """A function of C's that `call_soon` was given was taken for the loop's own work, which is refused nothing."""
    check("""
    async def one():
        kept, loop = [], asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: failures.append(context["exception"]))
        try:
            async with ctxalloc.request(whole=True, limit_bytes=2 * MiB) as request:
                loop.call_soon(kept.extend, map(str, range(400_000)))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except ctxalloc.BudgetExceeded as error:
            failures.append(error)
        return request.stats.whole.object_at_peak_bytes
    for _ in range(5):
        failures = []
        peak_bytes = asyncio.run(one())
        assert peak_bytes < 4 * MiB, peak_bytes
        assert any(isinstance(error, MemoryError) for error in failures), failures
    """)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_function_that_a_loop_tells_of_errors_is_called_out(loop: str) -> None:
    """It was told of the request's limit in its first line, and the error it was called for was lost."""
    pytest.importorskip(loop)
    check(
        """
    import LOOP
    class Fills:
        def __del__(self):
            for number in range(400_000):
                kept.append(str(number))
    def fails():
        Fills()
        raise KeyError
    def note(loop, context):
        noted.append(context.get("exception"))
    class Notes:
        def note(self, loop, context):
            note(loop, context)
    async def one():
        try:
            async with ctxalloc.request(whole=True, limit_bytes=2 * MiB):
                asyncio.get_running_loop().call_soon(fails)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except ctxalloc.BudgetExceeded:
            told.append(1)
        kept.clear()
    kept, noted, told = [], [], []
    sys.unraisablehook = lambda error: None
    for handler in (note, Notes().note):
        loop = LOOP.new_event_loop()
        loop.set_exception_handler(handler)
        for _ in range(10):
            loop.run_until_complete(loop.create_task(one()))
        loop.close()
    assert [type(error) for error in noted] == [KeyError] * 20, noted
    assert len(told) == 20, told
    """.replace("LOOP", loop)
    )


def test_a_step_of_a_task_is_not_refused_what_calls_it() -> None:
    """The tuple of its arguments was, where the request's memory was used up: the task was never stepped again."""
    check("""
    async def waits(kept):
        for _ in range(20):
            await asyncio.sleep(0)
            try:
                while True:
                    kept.append((len(kept),))  # up to what small blocks may take beyond the limit
            except MemoryError:
                pass
    async def one():
        try:
            async with ctxalloc.request(whole=True, limit_bytes=1 * MiB):
                kept = [[] for _ in range(4)]
                await asyncio.gather(*map(waits, kept), return_exceptions=True)
        except MemoryError:
            pass
    for _ in range(10):
        asyncio.run(asyncio.wait_for(one(), 60))
    """)
