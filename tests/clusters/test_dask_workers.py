"""Requests of Dask's tasks where workers come and go, where tasks are cancelled, and where plugins meet."""

import gc
import os
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import dask
import dask.array
import distributed
import numpy as np
import pytest
import work
from distributed import Client, LocalCluster
from workers import in_use, until

import ctxalloc
from ctxalloc import MiB, TaskBudgetExceeded
from ctxalloc.dask import RequestPlugin, report


@pytest.fixture
def own() -> Iterator[Any]:
    """A cluster of the test's own, of one worker: what it does to it stays in it."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, memory_limit="1GiB", dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def all_limit(client: Any, expected: int) -> bool:
    """Whether that many workers are there, and each of them has the plugin and its limit."""
    addresses = list(client.run(report))
    if len(addresses) != expected:
        return False
    futures = [client.submit(work.total, 100 * MiB, workers=[one], pure=False) for one in addresses]
    names = [client.submit(work.where, workers=[one], pure=False) for one in addresses]
    distributed.wait([*futures, *names], timeout=60)
    assert {type(future.exception()) for future in futures} == {TaskBudgetExceeded}
    assert {future.result() for future in names} == {("where", 0)}
    return True


# ---- workers come and go


def test_a_worker_that_is_killed_comes_back_with_the_plugin(own: Any) -> None:
    own.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    ((before, first),) = own.run(report).items()
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: list(own.scheduler_info()["workers"]) not in ([], [before]), "the Nanny started no other one")
    assert all_limit(own, 1)


def test_restarted_workers_have_the_plugin_again(own: Any) -> None:
    own.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    ((_, before),) = own.run(report).items()
    own.restart(timeout=120)
    assert all_limit(own, 1)
    ((_, after),) = own.run(report).items()
    assert before.pid != after.pid


def test_workers_that_an_adaptive_cluster_adds_have_the_plugin(own: Any) -> None:
    own.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    own.cluster.adapt(minimum=2, maximum=2)
    own.wait_for_workers(2, timeout=60)
    assert all_limit(own, 2)


def test_results_of_a_retired_worker_are_charged_no_longer_there(own: Any) -> None:
    own.register_plugin(RequestPlugin())
    own.cluster.scale(2)
    own.wait_for_workers(2, timeout=60)
    first, second = own.run(report)
    futures = own.map(work.ones, [8 * MiB] * 4, workers=[first], pure=False)
    distributed.wait(futures)
    assert in_use(own) >= 32 * MiB
    own.retire_workers([first])
    assert [int(total) for total in own.gather(own.map(_sum, futures, pure=False))] == [8 * MiB] * 4
    assert list(own.run(report)) == [second]


def _sum(array: Any) -> int:
    return int(array.sum(dtype=np.int64))


# ---- tasks that end otherwise


def test_a_cancelled_async_task_is_charged_until_it_ends(client: Any) -> None:
    """Dask forgets it at once, and lets it run."""
    client.register_plugin(RequestPlugin())
    client.run(_begin)
    futures = [client.submit(_keeps_and_waits, pure=False) for _ in range(4)]
    until(lambda: in_use(client) >= 32 * MiB, "they did not begin")
    client.cancel(futures)
    client.run(_end)
    until(lambda: in_use(client) < MiB, "what a cancelled task had stays charged")
    assert client.submit(work.where_async, pure=False).result() == ("where_async", 0)


_ENDED: set[bool] = set()


def _begin() -> None:
    _ENDED.clear()


def _end() -> None:
    _ENDED.add(True)


async def _keeps_and_waits() -> int:
    import asyncio

    kept = np.ones(8 * MiB, np.uint8)
    while not _ENDED:  # noqa: ASYNC110 - set by a function that runs beside the loop
        await asyncio.sleep(0.01)
    return kept.nbytes


def test_a_method_of_an_actor_that_is_gone_leaves_nothing_charged(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    future = client.submit(Waits, actor=True, pure=False)
    waits = future.result()
    calls = [waits.keep_and_wait() for _ in range(3)]
    until(lambda: in_use(client) >= 24 * MiB, "they did not begin")
    waits.let_go().result()
    assert [call.result() for call in calls] == [8 * MiB] * 3
    del waits, future, calls
    until(lambda: in_use(client) < MiB, "what an actor had stays charged")


class Waits:
    """An actor whose asynchronous methods are together on the worker's event loop."""

    def __init__(self) -> None:
        import asyncio

        self.may_end = asyncio.Event()

    async def keep_and_wait(self) -> int:
        kept = np.ones(8 * MiB, np.uint8)
        await self.may_end.wait()
        return kept.nbytes

    async def let_go(self) -> None:
        self.may_end.set()


def _keeps_and_fails(how: str) -> float:
    kept = np.ones(8 * MiB, np.uint8)
    if how == "at once":
        return kept.nbytes / 0
    try:
        return _keeps_and_fails("at once")
    except ZeroDivisionError as error:
        if how == "in a group":
            raise ExceptionGroup(how, [error]) from None
        if how == "while one is handled":
            raise ValueError(how)  # noqa: B904 - it is what is tested
        raise RuntimeError(how) from error


async def _keeps_and_fails_async(how: str) -> float:
    kept = np.ones(8 * MiB, np.uint8)
    return kept.nbytes * _keeps_and_fails(how)


@pytest.mark.parametrize("function", [_keeps_and_fails, _keeps_and_fails_async], ids=lambda function: function.__name__)
@pytest.mark.parametrize("how", ["at once", "in a group", "while one is handled", "from another"])
def test_a_task_that_fails_leaves_nothing_charged(client: Any, function: Any, how: str) -> None:
    """Dask keeps its frames, in a cycle, for as long as its future is wanted."""
    client.register_plugin(RequestPlugin())
    client.run(gc.collect)
    before = in_use(client)
    client.run(gc.disable)
    try:
        futures = [client.submit(function, how, pure=False) for _ in range(4)]
        distributed.wait(futures)
        assert {future.status for future in futures} == {"error"}
        until(lambda: in_use(client) < before + MiB, "what a failed task had stays charged", seconds=20)
    finally:
        client.run(gc.enable)
    assert "kept.nbytes / 0" in "".join(traceback.format_tb(futures[0].traceback())) or how != "at once"


def test_tasks_that_failed_before_leave_the_budget_to_others(client: Any) -> None:
    client.register_plugin(RequestPlugin(budget=64 * MiB))
    for _ in range(8):
        assert isinstance(client.submit(_fails_with, 40 * MiB, pure=False).exception(), ValueError)
        assert client.submit(work.total, 40 * MiB, pure=False).result() == 40 * MiB


def _fails_with(size_bytes: int) -> None:
    kept = np.ones(size_bytes, np.uint8)
    raise ValueError(kept.nbytes)


def test_the_inner_of_two_annotations_holds(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=4 * MiB))
    with dask.annotate(ctxalloc={"limit_bytes": 64 * MiB}):
        with dask.annotate(priority=5):
            kept = client.submit(work.total, 32 * MiB, pure=False)
        with dask.annotate(ctxalloc={"limit_bytes": 8 * MiB}):
            inner = client.submit(work.total, 32 * MiB, pure=False)
        outer = client.submit(work.total, 32 * MiB, pure=False)
    assert (kept.result(), outer.result()) == (32 * MiB, 32 * MiB)
    with pytest.raises(TaskBudgetExceeded) as refused:
        inner.result()
    assert refused.value.limit_bytes == 8 * MiB


def test_a_shuffle_between_workers_is_right_and_counted(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=256 * MiB))
    array = dask.array.arange(4_000_000, chunks=500_000).reshape(2000, 2000).rechunk((2000, 250), method="p2p")
    assert int(array.sum().compute()) == sum(range(4_000_000))
    assert any("p2p" in name or "rechunk" in name for one in client.run(report).values() for name in one.series)


def test_a_task_that_makes_tasks_in_tasks_has_each_in_its_own(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    assert client.submit(nested, 3, pure=False).result() == ["nested"] * 4
    with pytest.raises(TaskBudgetExceeded) as refused:
        client.submit(nested_greedy, pure=False).result()
    assert refused.value.prefix == "total", "the inner task's own name, through the outer"


def nested(depth: int) -> list[str | None]:
    request = ctxalloc.current_request()
    assert request is not None
    np.ones(10 * MiB, np.uint8)  # with the others' it would be too much
    mine = [request.name]
    if depth == 0:
        return mine
    with distributed.worker_client() as client:
        inner: list[str | None] = client.submit(nested, depth - 1, pure=False).result()
    return mine + inner


def nested_greedy() -> int:
    with distributed.worker_client() as client:
        return int(client.submit(work.total, 100 * MiB, pure=False).result())


# ---- plugins meet


def test_under_another_name_the_plugin_reports_too(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB), name="mine")
    try:
        assert client.submit(work.where, pure=False).result() == ("where", 0)
        assert in_use(client) == 0
    finally:
        client.unregister_worker_plugin("mine")


def test_a_second_plugin_under_another_name_is_refused() -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
        with pytest.raises(RuntimeError, match="this worker has one already, 'ctxalloc'"):
            client.register_plugin(RequestPlugin(limit_bytes=64 * MiB), name="other")
        with pytest.raises(RuntimeError, match="has one already"):
            client.submit(work.total, 1, pure=False).result()
        client.unregister_worker_plugin("other")
        with pytest.raises(TaskBudgetExceeded):
            client.submit(work.total, 32 * MiB, pure=False).result()
