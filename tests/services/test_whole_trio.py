"""Whole requests at their limits on the loops of trio and anyio: the task ends, the loop goes on, and nobody hangs.

A request around `trio.run` is charged what the loop makes itself, too.
"""

import overlapping_sends
import pytest
from whole_programs import check, needs_library

pytestmark = needs_library

START = """
    import anyio, contextlib, faulthandler, functools, trio
    faulthandler.dump_traceback_later(150, exit=True)
    def whole(limit_bytes):
        return ctxalloc.request(whole=True, limit_bytes=limit_bytes)
    def leaves(error):
        if isinstance(error, BaseExceptionGroup):
            return {leaf for one in error.exceptions for leaf in leaves(one)}
        return {type(error).__name__}
    async def next_one():
        with trio.move_on_after(60):
            await trio.sleep(0.0001)
        return 3
    def ends(work, where, limit_bytes, run=trio.run):
        async def inside():
            with whole(limit_bytes):
                await work()
        told = set()
        try:
            if where == "around":
                with whole(limit_bytes):
                    run(work)
            else:
                run(inside)
        except BaseException as error:
            told = leaves(error)
        assert told and told <= {"BudgetExceeded", "MemoryError"}, (told, where, limit_bytes)
        assert run(next_one) == 3
    def in_each_thread(program):
        for begins in sys.argv[1:]:
            told = []
            def main():
                program()
                told.append(begins)
            if begins == "thread":
                thread = threading.Thread(target=main)
                thread.start()
                thread.join()
            else:
                main()
            assert told == [begins]
"""


@pytest.mark.parametrize("thread", ["main", "thread"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_task_that_fills_its_limit_between_checkpoints_ends(where: str, thread: str) -> None:
    """The exception was raised in `outcome`, by which trio steps its tasks: the loop broke, or waited for ever."""
    check(
        START
        + f"""
    def program():
        for limit_bytes in (50 * KiB, 100 * KiB, 300 * KiB, MiB):
            for size in range(300, 330, 5):
                async def fill():
                    held = []
                    while True:
                        held.append(bytes(size))
                        await trio.lowlevel.checkpoint()
                ends(fill, {where!r}, limit_bytes)
    in_each_thread(program)
    """,
        thread,
    )


@pytest.mark.parametrize("thread", ["main", "thread"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_groups_channels_and_timeouts_end_with_their_request(where: str, thread: str) -> None:
    check(
        START
        + f"""
    async def part(held, size):
        for _ in range(20):
            held.append(" " * size)
            await trio.sleep(0)
    async def sends(channel, size):
        with contextlib.suppress(trio.BrokenResourceError):  # the other end was broken off
            async with channel:
                for _ in range(20):
                    await channel.send(" " * size)
    def program():
        for number in range(12):
            size = 300 + number
            async def groups():
                held = []
                while True:
                    async with trio.open_nursery() as nursery:
                        for _ in range(5):
                            nursery.start_soon(part, held, size)
            async def channels():
                held = []
                while True:
                    to, source = trio.open_memory_channel(3)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(sends, to, size)
                        async with source:
                            async for text in source:
                                held.append(text)
            async def timeouts():
                held, lock, event = [], trio.Lock(), trio.Event()
                while True:
                    with trio.move_on_after(0.0001):
                        async with lock:
                            held.append(" " * size)
                            await event.wait()
                    async with lock:
                        held.extend(" " * (size + n) for n in range(100))
            async def threads():
                held = []
                while True:
                    await trio.to_thread.run_sync(lambda: held.extend(" " * (size + n) for n in range(100)))
            for work in groups, channels, timeouts, threads:
                ends(work, {where!r}, (300 + 100 * number) * KiB)
    in_each_thread(program)
    """,
        thread,
    )


@pytest.mark.parametrize("where", ["inside", "around"])
def test_anyio_on_trio_ends_with_its_request(where: str) -> None:
    check(
        START
        + f"""
    async def part(held, size):
        for _ in range(20):
            held.append(" " * size)
            await anyio.sleep(0)
    def program():
        run = functools.partial(anyio.run, backend="trio")
        for number in range(12):
            size = 300 + number
            async def work():
                held = []
                while True:
                    async with anyio.create_task_group() as group:
                        for _ in range(5):
                            group.start_soon(part, held, size)
                    with anyio.move_on_after(60):
                        await anyio.to_thread.run_sync(lambda: held.extend(" " * (size + n) for n in range(100)))
            ends(work, {where!r}, (300 + 100 * number) * KiB, run)
    in_each_thread(program)
    """,
        *("main", "thread"),
    )


def test_a_function_of_cs_in_a_worker_thread_is_refused() -> None:
    """No Python code of its own runs there: the innermost is the loop's, in a thread that no task waits on."""
    check(
        START
        + """
    text = json.dumps([str(number) for number in range(400_000)])
    async def parses(run_sync):
        with whole(8 * MiB) as request:
            try:
                await run_sync(json.loads, text)
            except MemoryError:
                pass
            assert request.stats.peak_bytes <= 8 * MiB, request.stats
    trio.run(parses, trio.to_thread.run_sync)
    anyio.run(parses, anyio.to_thread.run_sync, backend="trio")
    anyio.run(parses, anyio.to_thread.run_sync, backend="asyncio")
    """
    )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_a_process_writes_is_held_to_the_limit(backend: str) -> None:
    """Its pieces are kept by the library, as many as come."""
    check(
        START
        + f"""
    command = [sys.executable, "-S", "-c", "import sys; [sys.stdout.write('x' * 65536) for _ in range(1000)]"]
    async def reads(run_process):
        with whole(8 * MiB) as request:
            try:
                await run_process(command)
            finally:
                assert request.stats.peak_bytes < 12 * MiB, request.stats
    async def main(*by):
        for run_process in by:
            try:
                await reads(run_process)
            except (MemoryError, BaseExceptionGroup) as error:
                assert leaves(error) <= {{"BudgetExceeded", "MemoryError"}}, error
            else:
                raise AssertionError("it was read whole")
    trios = [functools.partial(trio.run_process, capture_stdout=True)] if {backend!r} == "trio" else []
    anyio.run(main, anyio.run_process, *trios, backend={backend!r})
    """,
    )


def test_no_part_of_the_body_overtakes_the_headers() -> None:
    check(overlapping_sends.PROGRAM, "trio")


SERVED = """
    import hashlib
    from ctxalloc.asgi import AllocatorMiddleware
    def take():
        hashlib.scrypt(b"a", salt=b"b", n=2**13, r=8, p=1)  # OpenSSL's 8 MiB are granted
    outcomes = []
    async def served(app, path):
        sent = []
        async def send(message):
            await trio.lowlevel.checkpoint()
            sent.append(message.get("status"))
        service = AllocatorMiddleware(
            app, default=ctxalloc.request(whole=True, limit_bytes=4 * MiB, budget=service_budget),
            on_end=lambda scope, report: outcomes.append(report.outcome),
        )
        await service({"type": "http", "path": path, "method": "GET", "headers": []}, None, send)
        return sent[0]
    service_budget = ctxalloc.Budget(100 * MiB, name="service")
    HEADERS = {"type": "http.response.start", "status": 200, "headers": []}
"""


@pytest.mark.parametrize("path", ["/ends", "/goes-on", "/beside"])
def test_what_a_child_has_taken_leaves_the_nursery_whole(path: str) -> None:
    """The exception was thrown into the end of the nursery, and all that trio ran died with it."""
    check(
        START
        + SERVED
        + """
    async def child():
        await trio.to_thread.run_sync(take)
        if path == "/goes-on":
            await trio.lowlevel.checkpoint()
        taken.set()
    async def app(scope, receive, send):
        async with trio.open_nursery() as nursery:
            if scope["path"] == path:
                nursery.start_soon(child)
            if scope["path"] == "/beside":
                nursery.start_soon(taken.wait)
        await send(HEADERS)
        await send({"type": "http.response.body", "body": b"x"})
    path = sys.argv[1]
    async def main():
        global taken
        answers = []
        async def one(at):
            answers.append((at, await served(app, at)))
        for _ in range(5):
            taken = trio.Event()
            async with trio.open_nursery() as server:
                server.start_soon(one, "/modest")
                server.start_soon(one, path)
        assert sorted(answers) == sorted([("/modest", 200), (path, 413)] * 5), answers
    trio.run(main)
    assert sorted(outcomes) == ["completed"] * 5 + ["refused"] * 5, outcomes
    """,
        path,
    )


def test_a_thread_that_calls_back_gets_its_answer() -> None:
    """The exception was thrown in the place of the thread's call, so the thread waited for ever, with what it held."""
    check(
        START
        + SERVED
        + """
    async def app(scope, receive, send):
        def work():
            take()
            trio.from_thread.run(send, HEADERS)
            trio.from_thread.run(send, {"type": "http.response.body", "body": b"x"})
        await trio.to_thread.run_sync(work)
    async def main():
        assert [await served(app, "/") for _ in range(8)] == [413] * 8
    trio.run(main)
    assert outcomes == ["refused"] * 8
    gc.collect()
    assert service_budget.in_use_bytes < 8 * MiB, service_budget.in_use_bytes
    """
    )
