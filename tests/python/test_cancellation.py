"""Cancelling either side of an await across the border cancels the other: before it began, midway, and at the end.

`await_python(f)` is a Rust future that awaits the coroutine `f()`. A test waits for events that the
cancelled side sets, and fails where one is not set in time (`patience.py`).
"""

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from patience import wait_for

import ctxalloc
import ctxalloc_example as example
from ctxalloc import current, use

Run = Callable[[Awaitable[Any]], Any]


class Sleeper:
    """A coroutine function that waits for ever, and tells what happened to it."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.seen: list[str] = []

    async def __call__(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append("cancelled in " + current().name)
            raise
        finally:
            self.ended.set()


# ---- Python cancels Rust, which cancels Python -------------------------------------------------------


def test_cancelling_the_future_cancels_the_coroutine_in_its_context(run: Run) -> None:
    async def main() -> None:
        sleeper = Sleeper()
        future = example.await_python(sleeper, "aligned64")
        await sleeper.started.wait()
        assert future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        assert future.cancelled()
        await sleeper.ended.wait()
        assert sleeper.seen == ["cancelled in aligned64"]

    run(main())


def test_cancelling_the_task_that_awaits_cancels_the_coroutine(run: Run) -> None:
    async def main() -> None:
        sleeper = Sleeper()

        async def awaits() -> None:
            async with use("aligned64"):
                await example.await_python(sleeper)

        task = asyncio.create_task(awaits())
        await sleeper.started.wait()
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await sleeper.ended.wait()
        assert sleeper.seen == ["cancelled in aligned64"]

    run(main())


def test_a_future_cancelled_before_it_began_runs_nothing_of_the_coroutine(run: Run) -> None:
    began: list[int] = []

    async def begins() -> None:
        began.append(1)

    async def main() -> None:
        for _ in range(50):
            future = example.await_python(begins)
            future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
        # At most the start was under way already; it must not hang, fail or complain in any case.
        await example.await_python(begins)
        assert began

    run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
def test_a_future_cancelled_before_it_began_makes_no_eager_step_either() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        for _ in range(20):
            entered = threading.Event()
            began: list[int] = []

            async def begins(began: list[int] = began) -> None:
                began.append(1)

            def function(entered: threading.Event = entered, begins: Any = begins) -> Coroutine[Any, Any, None]:
                entered.set()  # on a worker, while the loop's thread waits below
                coroutine: Coroutine[Any, Any, None] = begins()
                return coroutine

            future = example.await_python(function)
            wait_for(entered)
            future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
            await example.await_python(begins)  # after whatever the loop had to do for the cancelled one
            assert len(began) in (1, 2)

    asyncio.run(main())


def test_a_timeout_cancels_through_rust(run: Run) -> None:
    async def main() -> None:
        for wait in (
            lambda future: asyncio.wait_for(future, 0.01),
            in_timeout,
        ):
            sleeper = Sleeper()
            with pytest.raises(TimeoutError):
                await wait(example.await_python(sleeper))
            # Either it was cancelled midway, or before it began.
            if sleeper.started.is_set():
                await sleeper.ended.wait()
        assert current().name == "default_allocator"

    async def in_timeout(future: Awaitable[Any]) -> None:
        async with asyncio.timeout(0.01):
            await future

    run(main())


def test_a_task_group_that_fails_cancels_its_rust_futures(run: Run) -> None:
    async def main() -> None:
        sleepers = [Sleeper() for _ in range(5)]

        async def awaits(sleeper: Sleeper) -> None:
            await example.await_python(sleeper, "aligned64")

        async def fails() -> None:
            for sleeper in sleepers:
                await sleeper.started.wait()
            raise KeyError("one fails")

        async def group() -> None:
            async with asyncio.TaskGroup() as tasks:
                for sleeper in sleepers:
                    tasks.create_task(awaits(sleeper))
                tasks.create_task(fails())

        with pytest.raises(ExceptionGroup) as caught:
            await group()
        assert caught.group_contains(KeyError)
        for sleeper in sleepers:
            await sleeper.ended.wait()
            assert sleeper.seen == ["cancelled in aligned64"]

    run(main())


def test_a_shielded_future_goes_on(run: Run) -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def finishes() -> str:
            await go.wait()
            return current().name

        future = example.await_python(finishes, "aligned64")
        shield = asyncio.shield(future)
        shield.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shield
        go.set()
        assert await future == "aligned64"

    run(main())


def test_a_coroutine_that_refuses_to_be_cancelled_ends_on_its_own(run: Run) -> None:
    async def main() -> None:
        started, refused, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def refuses() -> str:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                refused.set()
            await asyncio.sleep(0)
            ended.set()
            return "nobody hears this"

        future = example.await_python(refuses)
        await started.wait()
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future  # Rust does not wait for it
        await refused.wait()
        await ended.wait()

    run(main())


def test_cancelling_a_future_that_is_done_changes_nothing(run: Run) -> None:
    async def quick() -> int:
        return 7

    async def main() -> None:
        future = example.await_python(quick)
        assert await future == 7
        assert not future.cancel()
        assert future.result() == 7

    run(main())


def test_cancelling_at_any_moment_never_hangs_or_complains(run: Run) -> None:
    # The cancellation meets the other side at every stage: queued, starting, running, answering, done.
    outcomes: set[str] = set()
    complaints: list[Any] = []

    async def work() -> int:
        await asyncio.sleep(0)
        return 1

    async def one(yields: int) -> None:
        future = example.await_python(work, "aligned64")
        for _ in range(yields):
            await asyncio.sleep(0)
        future.cancel()
        try:
            outcomes.add(f"result {await future}")
        except asyncio.CancelledError:
            outcomes.add("cancelled")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        for yields in [*range(40), *range(0, 4000, 200)]:
            await asyncio.gather(*(one(yields) for _ in range(5)))
        gc.collect()

    run(main())
    assert "cancelled" in outcomes
    assert outcomes <= {"cancelled", "result 1"}
    assert complaints == []


# ---- Python cancels itself, and Rust hears of it -----------------------------------------------------


def test_a_coroutine_that_is_cancelled_cancels_the_future_that_awaits_it(run: Run) -> None:
    async def main() -> None:
        tasks: list[asyncio.Task[Any]] = []
        started = asyncio.Event()

        async def cancelled() -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            started.set()
            await asyncio.Event().wait()

        future = example.await_python(cancelled, "aligned64")
        await started.wait()
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        assert future.cancelled()  # and no exception that somebody would have to retrieve
        current_task = asyncio.current_task()
        assert current_task is not None
        assert current_task.cancelling() == 0

    run(main())


def test_a_coroutine_that_raises_cancelled_error_counts_as_cancelled(run: Run) -> None:
    async def raises() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        future = example.await_python(raises)
        done, _ = await asyncio.wait([future])
        assert done == {future}
        assert future.cancelled()

    run(main())


def test_the_other_floors_hear_of_it_through_many_awaits(run: Run) -> None:
    async def main() -> None:
        seen: list[str] = []
        bottom, ended = asyncio.Event(), asyncio.Event()
        names = ["aligned64", "system", "default_allocator"]

        async def floor(depth: int) -> None:
            try:
                if depth == 8:
                    bottom.set()
                    await asyncio.Event().wait()
                await example.await_python(lambda: floor(depth + 1), names[(depth + 1) % 3])
            except asyncio.CancelledError:
                seen.append(f"{depth} in {current().name}")
                raise
            finally:
                if depth == 8:
                    ended.set()

        future = example.await_python(lambda: floor(0), names[0])
        await bottom.wait()
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        await ended.wait()
        assert sorted(seen) == [f"{depth} in {names[depth % 3]}" for depth in range(9)]
        assert current().name == "default_allocator"

    run(main())


# ---- ends of event loops -----------------------------------------------------------------------------


def test_the_end_of_the_loop_cancels_what_rust_still_awaits(capfd: pytest.CaptureFixture[str], run: Run) -> None:
    sleepers: list[Sleeper] = []

    async def main() -> Any:
        sleepers.append(Sleeper())
        future = example.await_python(sleepers[0], "aligned64")
        await sleepers[0].started.wait()
        return future

    future = run(main())
    assert sleepers[0].seen == ["cancelled in aligned64"]
    del future
    assert capfd.readouterr() == ("", "")


class EndIsSeen:
    """Sets an event when it goes."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended = ended

    def __del__(self) -> None:
        self.ended.set()


def test_awaiting_on_a_closed_loop_fails_and_ends_the_coroutine(collect: Callable[[], None]) -> None:
    # The Rust task outlives its loop and only then asks for Python. Not one warning that nobody awaited.
    go, ended = threading.Event(), threading.Event()

    async def never(held: EndIsSeen) -> None:
        raise AssertionError(held)

    def asks_late() -> Coroutine[Any, Any, None]:
        go.wait()
        return never(EndIsSeen(ended))

    async def main() -> None:
        example.await_python(asks_late, "aligned64")

    asyncio.run(main())
    go.set()
    wait_for(ended, collect)


def test_a_loop_closed_before_the_first_step_ends_the_coroutine(collect: Callable[[], None]) -> None:
    go, ended, posted = threading.Event(), threading.Event(), threading.Event()

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
            handle = super().call_soon_threadsafe(*arguments, **options)
            posted.set()
            return handle

    async def never(held: EndIsSeen) -> None:
        raise AssertionError(held)

    def asks_between() -> Coroutine[Any, Any, None]:
        go.wait()
        return never(EndIsSeen(ended))

    async def main() -> None:
        example.await_python(asks_between, "aligned64")

    loop = Loop()
    loop.run_until_complete(main())
    posted.clear()
    go.set()
    wait_for(posted)  # the loop has been told, and runs no more
    loop.close()
    wait_for(ended, collect)


def test_the_next_loop_is_not_disturbed_by_the_last_ones_futures(run: Run) -> None:
    async def leaves() -> None:
        for _ in range(20):
            example.await_python(Sleeper(), "aligned64")
        await asyncio.sleep(0)

    async def works() -> Any:
        return await example.await_python(tells, "system")

    async def tells() -> str:
        return current().name

    for _ in range(5):
        run(leaves())
        assert run(works()) == "system"
    assert ctxalloc.current().name == "default_allocator"
