"""Each task of Dask in a request of its own, on real workers: two processes with two threads each."""

import asyncio
import gc
import pickle
import subprocess
import sys
import time
import traceback
import urllib.request
from pathlib import Path
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
import ctxalloc.dask
from ctxalloc import MiB, TaskBudgetExceeded, _dask
from ctxalloc.dask import RequestPlugin, Summary, report, summary

IS_OLDEST = distributed.__version__ == "2024.12.0"


def pids(client: Any) -> set[int]:
    return {one.pid for one in client.run(report).values()}


# ---- every kind of task


def test_without_the_plugin_a_task_is_in_no_request(client: Any) -> None:
    assert client.submit(work.where, pure=False).result() == (None, None)


@pytest.mark.parametrize("function", [work.where, work.where_async], ids=lambda function: function.__name__)
def test_a_task_is_in_a_request_named_after_its_prefix(client: Any, function: Any) -> None:
    client.register_plugin(RequestPlugin())
    name, before = client.submit(function, pure=False).result()
    assert name == {"where": "where", "where_async": "where_async"}[function.__name__]
    assert before == 0, "it began empty: the request is this task's own"


def test_tasks_at_the_same_time_have_requests_of_their_own(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    futures = client.map(work.where, range(200), pure=False)
    assert set(client.gather(futures)) == {("where", 0)}
    assert sum(one.series["where"].requests for one in client.run(report).values()) >= 200


def test_tasks_of_an_array_graph_are_counted_by_their_prefixes(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    before = summary(client).series
    array = dask.array.ones((2000, 2000), chunks=(500, 500))
    assert float((array + array.T).mean().compute()) == 2.0
    after = summary(client).series
    new = sum(series.requests for series in after.values()) - sum(series.requests for series in before.values())
    assert new >= 16, "each of its 16 blocks is a task, or is fused into one"
    assert max(series.max_peak_bytes for name, series in after.items() if "mean" in name) >= 500 * 500 * 8


def test_tasks_of_a_dataframe_graph_are_limited(client: Any) -> None:
    pytest.importorskip("dask.dataframe")
    import dask.dataframe
    import pandas as pd

    client.register_plugin(RequestPlugin(limit_bytes=64 * MiB))
    frame = dask.dataframe.from_pandas(pd.DataFrame({"x": np.arange(1000), "y": 1.0}), npartitions=4)
    assert float(frame.y.sum().compute()) == 1000
    with pytest.raises(TaskBudgetExceeded):
        frame.map_partitions(_widened, meta=frame._meta).compute()


def _widened(part: Any) -> Any:
    np.ones(100 * MiB, np.uint8)
    return part


def test_a_seceded_task_stays_in_its_request(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=8 * MiB))
    assert client.submit(secedes, pure=False).result() == "secedes"
    with pytest.raises(TaskBudgetExceeded):
        client.submit(secedes, 9 * MiB, pure=False).result()


def secedes(size_bytes: int = 0) -> str | None:
    distributed.secede()
    np.ones(size_bytes, np.uint8)
    request = ctxalloc.current_request()
    return None if request is None else request.name


def test_a_task_that_waits_for_tasks_of_its_own_does_not_take_them_in(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    outer, inner = client.submit(has_tasks, pure=False).result()
    assert outer == "has_tasks"
    assert inner == [("where", 0)] * 4


def has_tasks() -> Any:
    kept = np.ones(MiB)
    with distributed.worker_client() as client:
        inner = client.gather(client.map(work.where, range(4), pure=False))
    request = ctxalloc.current_request()
    assert request is not None
    assert request.stats.live_bytes >= kept.nbytes
    return request.name, inner


# ---- refusals


def test_a_refused_task_says_which_and_its_worker_goes_on(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    before = pids(client)
    future = client.submit(work.total, 100 * MiB, key="total-of-much")
    with pytest.raises(TaskBudgetExceeded, match="task 'total-of-much': budget 'total-of-much' has no room") as refused:
        future.result()
    error = refused.value
    assert (error.key, error.prefix, error.budget) == ("total-of-much", "total-of-much", "total-of-much")
    assert (error.limit_bytes, error.requested_bytes) == (16 * MiB, 100 * MiB)
    assert isinstance(error, ctxalloc.BudgetExceeded)
    assert isinstance(error, MemoryError)
    assert "np.ones" in "".join(traceback.format_exception(error)), "it does not say where in the task it was"
    assert client.submit(work.total, MiB, pure=False).result() == MiB
    assert pids(client) == before


def test_an_async_task_is_refused_alike(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    with pytest.raises(TaskBudgetExceeded) as refused:
        client.submit(work.total_async, 100 * MiB, pure=False).result()
    assert refused.value.prefix == "total_async"


def test_a_refusal_goes_through_pickle_whole() -> None:
    error = TaskBudgetExceeded("sum", 10, 5, 8, ("sum-abc", 1, 2), "sum")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), back.args, vars(back)) == (type(error), error.args, vars(error))
    assert str(back) == str(error)
    assert "('sum-abc', 1, 2)" in str(back)


def test_exactly_the_greedy_tasks_fail(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    sizes = [100 * MiB if number % 10 == 3 else 1 + number for number in range(300)]
    futures = client.map(work.total, sizes, pure=False)
    distributed.wait(futures)
    failed = [size for future, size in zip(futures, sizes, strict=True) if future.status == "error"]
    assert failed == [size for size in sizes if size == 100 * MiB]
    assert all(isinstance(future.exception(), TaskBudgetExceeded) for future in futures if future.status == "error")


def test_retries_apply_to_a_refused_task(client: Any, tmp_path: Path) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    future = client.submit(_less_the_second_time, str(tmp_path / "tried"), retries=2, pure=False)
    assert future.result() == 2


def _less_the_second_time(path: str) -> int:
    with Path(path).open("a+") as tried:
        tried.write("x")
    count = len(Path(path).read_text())
    np.ones(100 * MiB if count == 1 else MiB, np.uint8)
    return count


def test_a_memory_error_of_the_task_itself_is_left_as_it_is(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    with pytest.raises(MemoryError, match="my own") as raised:
        client.submit(_raises, pure=False).result()
    assert not isinstance(raised.value, ctxalloc.BudgetExceeded)


def _raises() -> None:
    raise MemoryError("my own")


def test_what_a_refused_task_had_is_free_at_once(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    client.run(gc.disable)
    try:
        futures = [client.submit(work.spread, 64 * MiB, pure=False) for _ in range(8)]
        distributed.wait(futures)
        assert {future.status for future in futures} == {"error"}
        until(lambda: in_use(client) < MiB, "what refused tasks had made stays charged")
    finally:
        client.run(gc.enable)


# ---- terms


def test_an_annotation_comes_before_a_prefix_and_that_before_the_plugin(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=8 * MiB, prefixes={"spread": {"limit_bytes": 32 * MiB}}))

    def passes(size_bytes: int, function: Any = work.spread, **terms: int) -> bool:
        context = dask.annotate(ctxalloc=terms) if terms else dask.annotate()
        with context:
            future = client.submit(function, size_bytes, pure=False)
        distributed.wait(future)
        return bool(future.status == "finished")

    assert passes(4 * MiB, work.total)
    assert not passes(16 * MiB, work.total), "the plugin's limit"
    assert passes(16 * MiB), "the prefix's"
    assert not passes(64 * MiB), "the prefix's"
    assert passes(64 * MiB, limit_bytes=80 * MiB), "the annotation's"
    assert not passes(16 * MiB, limit_bytes=2 * MiB), "the annotation's"


def test_an_annotated_array_graph_has_its_own_limit(client: Any) -> None:
    if IS_OLDEST:
        pytest.skip("that release drops the annotations of tasks that it fuses; terms by prefix hold")
    client.register_plugin(RequestPlugin(limit_bytes=4 * MiB))

    def mean() -> Any:  # not of ones, which are a single number seen often
        return dask.array.arange(1_000_000, chunks=1_000_000, dtype=float).mean()

    with pytest.raises(TaskBudgetExceeded):
        mean().compute()
    with dask.annotate(ctxalloc={"limit_bytes": 64 * MiB}):
        annotated = mean()
    assert float(annotated.compute(optimize_graph=False)) == 499_999.5


def test_none_is_no_request(client: Any) -> None:
    client.register_plugin(RequestPlugin(prefixes={"where_async": None}))
    if not IS_OLDEST:  # which drops annotations that are None
        with dask.annotate(ctxalloc=None):
            assert client.submit(work.where, pure=False).result() == (None, None)
    assert client.submit(work.where_async, pure=False).result() == (None, None)
    assert client.submit(work.where, pure=False).result() == ("where", 0)


def test_a_handler_instead_of_a_request(client: Any) -> None:
    client.register_plugin(RequestPlugin(handler="aligned64"))
    assert client.submit(work.handler_of_new, pure=False).result() == "aligned64"
    assert client.submit(work.where, pure=False).result() == (None, None)
    with dask.annotate(ctxalloc={"limit_bytes": MiB}), pytest.raises(TaskBudgetExceeded):
        client.submit(work.total, 2 * MiB, pure=False).result()


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"limit": 5}, "no terms; there are"),
        ({"limit_bytes": -1}, "limit_bytes"),
        ({"handler": "nobody"}, "no handler is named 'nobody'"),
        ({"handler": "pool", "limit_bytes": 5}, "nothing to limit"),
        (5, "5 are no terms"),
    ],
    ids=str,
)
def test_an_impossible_annotation_fails_its_task_and_says_why(client: Any, terms: Any, message: str) -> None:
    client.register_plugin(RequestPlugin())
    with dask.annotate(ctxalloc=terms):
        future = client.submit(work.total, 1, pure=False)
    with pytest.raises((TypeError, ValueError), match=message):
        future.result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_bytes": "much"}, "limit_bytes"),
        ({"limit_bytes": -1}, "limit_bytes"),
        ({"handler": 5}, "name of a handler"),
        ({"budget": "all"}, "'auto' or None"),
        ({"budget": -1}, "limit_bytes"),
        ({"prefixes": {"sum": {"limit": 5}}}, r"prefixes=\{'sum': \.\.\.\}"),
        ({"prefixes": ["sum"]}, r"prefixes=\.\.\.\): \['sum'\] has no terms; give a dict"),
        ({"prefixes": "sum"}, "'sum' has no terms; give a dict"),
    ],
    ids=str,
)
def test_an_option_that_is_not_possible_is_refused_where_it_is_written(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError), match=message):
        RequestPlugin(**options)


# ---- actors, other executors


def test_methods_of_an_actor_are_in_requests_of_their_own(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    store = client.submit(work.Store, actor=True, pure=False).result()
    assert store.where().result() == ("Store.where", 0)
    assert store.where_async().result() == ("Store.where_async", 0)
    assert store.where(separate_thread=False).result() == ("Store.where", 0)


@pytest.mark.parametrize("method", ["add", "add_async"])
def test_a_refused_method_of_an_actor_fails_alone(client: Any, method: str) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    store = client.submit(work.Store, actor=True, pure=False).result()
    with pytest.raises(TaskBudgetExceeded) as refused:
        getattr(store, method)(100 * MiB).result()
    assert refused.value.prefix == f"Store.{method}"
    assert getattr(store, method)(MiB).result() == 2


def test_what_an_actor_keeps_stays_charged(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    before = in_use(client)  # what failed in other tests stays until the collector passes
    future = client.submit(work.Store, actor=True, pure=False)
    store = future.result()
    for _ in range(4):
        store.add(8 * MiB).result()
    assert in_use(client) >= 32 * MiB
    del store, future
    until(lambda: in_use(client) < before + MiB, "what the actor kept stays charged after its end")


def test_a_limit_holds_in_an_executor_of_processes(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    client.run(_add_processes)
    try:
        with dask.annotate(executor="processes"):
            here = client.submit(work.pid, pure=False)
            fits = client.submit(work.total, MiB, pure=False)
            greedy = client.submit(work.total, 100 * MiB, pure=False)
        assert here.result() not in pids(client)
        assert fits.result() == MiB
        with pytest.raises(TaskBudgetExceeded):
            greedy.result()
    finally:
        client.run(_remove_processes)


def _add_processes(dask_worker: Any) -> None:
    import concurrent.futures
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # a Nanny's worker is one, and may have no children
    context = multiprocessing.get_context("spawn")
    dask_worker.executors["processes"] = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)


def _remove_processes(dask_worker: Any) -> None:
    dask_worker.executors.pop("processes").shutdown()


# ---- the plugin comes and goes


def test_without_the_plugin_again_all_is_as_before(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    store = client.submit(work.Store, actor=True, pure=False).result()
    client.unregister_worker_plugin("ctxalloc")
    assert client.submit(work.where, pure=False).result() == (None, None)
    assert store.where().result() == (None, None)
    for changed in client.run(_what_is_changed).values():
        assert changed == []


def _what_is_changed(dask_worker: Any) -> list[str]:
    changed = []
    if "get_process_memory" in vars(dask_worker.monitor):
        changed.append("monitor")
    if "submit" in vars(dask_worker.executors["actor"]):
        changed.append("executor")
    if dask_worker.handlers["actor_execute"] != dask_worker.actor_execute:
        changed.append("handler")
    return changed


def test_registered_again_it_replaces_the_one_before(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=MiB))
    client.register_plugin(RequestPlugin(limit_bytes=64 * MiB))
    assert client.submit(work.total, 16 * MiB, pure=False).result() == 16 * MiB


def test_a_preload_needs_no_line_in_the_client(tmp_path: Path) -> None:
    settings = {
        "distributed.worker.preload": ["ctxalloc.dask"],
        "ctxalloc": {"limit-bytes": 16 * MiB, "prefixes": {"spread": None}},
    }
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert client.submit(work.where, pure=False).result() == ("where", 0)
        with pytest.raises(TaskBudgetExceeded):
            client.submit(work.total, 100 * MiB, pure=False).result()
        assert client.submit(work.spread, 100 * MiB, pure=False).result() == 100


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"limit": 5}, r"\['limit'\] are no options; there are \['limit_bytes', 'handler'"),
        ({"prefixes": ["total"]}, r"prefixes=\.\.\.\): \['total'\] has no terms; give a dict"),
        ({"prefixes": "total"}, r"prefixes=\.\.\.\): 'total' has no terms; give a dict"),
        ({"prefixes": {5: {"limit_bytes": 5}}}, r"\[5\] are no names; give a dict"),
        (67108864, "'ctxalloc' in Dask's configuration: 67108864 has no options; give a mapping"),
        ({"limit-bytes": "64 MiB"}, "limit_bytes"),
        ({"limit-bytes": 1 << 70}, "limit_bytes"),
    ],
    ids=str,
)
def test_a_preload_with_impossible_options_runs_no_task(found: Any, message: str) -> None:
    with (
        dask.config.set({"distributed.worker.preload": ["ctxalloc.dask"], "ctxalloc": found}),
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        pytest.raises((TypeError, ValueError), match=message),
    ):
        client.submit(work.total, 1, pure=False).result()


def test_an_unknown_release_runs_no_task_without_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        monkeypatch.setattr(distributed, "__version__", "2023.1.0")
        with pytest.raises(RuntimeError, match=r"works with distributed 2024\.12\.0 and later"):
            client.register_plugin(RequestPlugin())
        with pytest.raises(RuntimeError, match="decorate the functions"):
            client.submit(work.total, 1, pure=False).result()
        client.unregister_worker_plugin("ctxalloc")
        assert client.submit(work.total, 1, pure=False).result() == 1


def test_a_task_of_an_unknown_kind_fails_instead_of_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(RequestPlugin())
        monkeypatch.setattr(_dask, "GraphNode", dict)
        with pytest.raises(RuntimeError, match="a task is a Task"):
            client.submit(work.total, 1, pure=False).result()


def test_the_decorator_works_without_the_plugin(client: Any) -> None:
    decorated = ctxalloc.request(limit_bytes=16 * MiB, name="mine")(work.total)  # pickled by value
    with pytest.raises(ctxalloc.BudgetExceeded, match="budget 'mine' has no room"):
        client.submit(decorated, 100 * MiB, pure=False).result()
    assert client.submit(decorated, MiB, pure=False).result() == MiB


def test_an_asynchronous_client_works_too() -> None:
    async def main() -> None:
        async with (
            LocalCluster(
                n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0", asynchronous=True
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
            assert await client.submit(work.where_async, pure=False) == ("where_async", 0)
            with pytest.raises(TaskBudgetExceeded):
                await client.submit(work.total, 100 * MiB, pure=False)
            with pytest.raises(TypeError, match="asynchronous"):
                summary(client)
            assert "where_async" in Summary((await client.run(report)).values()).series

    asyncio.run(main())


# ---- results, the worker's budget


def test_results_stay_charged_while_they_are_wanted(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    futures = client.map(work.ones, [4 * MiB] * 16, pure=False)
    distributed.wait(futures)
    assert in_use(client) >= 64 * MiB
    del futures
    until(lambda: in_use(client) < MiB, "results that nobody wants stay charged")


def test_limits_hold_beside_20000_live_results(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    before = sum(one.resident_bytes for one in client.run(report).values())
    count = 20_000
    futures = client.map(work.ones, [1000] * count, pure=False)
    distributed.wait(futures)
    assert in_use(client) >= count * 1000
    refused = client.map(work.total, [100 * MiB] * 50, pure=False)
    distributed.wait(refused)
    assert {type(future.exception()) for future in refused} == {TaskBudgetExceeded}
    # A page of 64 KiB pinned by each result would be 1.3 GB.
    assert sum(one.resident_bytes for one in client.run(report).values()) - before < 400 * MiB
    del futures, refused
    until(lambda: in_use(client) < MiB, "results that nobody wants stay charged")


def test_the_workers_budget_is_over_all_its_tasks(client: Any) -> None:
    client.register_plugin(RequestPlugin(budget=64 * MiB))
    with pytest.raises(TaskBudgetExceeded) as refused:
        client.submit(work.spread, 100 * MiB, pure=False).result()
    assert refused.value.budget.startswith("worker ")
    assert refused.value.limit_bytes == 64 * MiB
    assert client.submit(work.spread, 32 * MiB, pure=False).result() == 32


def test_the_budget_follows_what_others_have_in_the_process(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    limits = [one.budget.limit_bytes for one in client.run(report).values()]
    assert all(256 * MiB < limit < 0.9 * 1024 * MiB for limit in limits)
    client.run(_hold_others, 200 * MiB)
    try:

        def has_shrunk() -> bool:
            now = [one.budget.limit_bytes for one in client.run(report).values()]
            return all(after < before - 150 * MiB for after, before in zip(now, limits, strict=True))

        until(has_shrunk, "the budget does not follow what others have in the process")
    finally:
        client.run(_let_go_of_others)


_OTHERS: list[bytearray] = []


def _hold_others(size_bytes: int) -> None:
    _OTHERS.append(bytearray(b"x") * size_bytes)


def _let_go_of_others() -> None:
    _OTHERS.clear()


def test_a_worker_without_a_memory_limit_has_no_budget() -> None:
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, memory_limit=0, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(RequestPlugin())
        (one,) = client.run(report).values()
        assert one.budget is None
        assert client.submit(work.where, pure=False).result() == ("where", 0)


def test_warm_memory_goes_back_before_the_worker_is_told(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    for warm, after in client.run(_warm_then_asked).values():
        assert warm >= 150 * MiB, "the test needs warm memory"
        assert after < 32 * MiB


def _warm_then_asked(dask_worker: Any) -> tuple[int, int]:
    dask_worker.plugins["ctxalloc"]._attached._pressure_bytes = MiB  # as if the worker had less memory
    with ctxalloc.request():
        kept = [np.ones(MiB, np.uint8) for _ in range(200)]
    del kept
    warm = ctxalloc.coverage().pools_warm_bytes
    dask_worker.monitor.get_process_memory()
    return warm, ctxalloc.coverage().pools_warm_bytes


def test_an_idle_worker_gives_back_what_its_pools_keep(client: Any) -> None:
    """Pools themselves would wait ten seconds."""
    client.register_plugin(RequestPlugin())
    client.gather(client.map(work.spread, [100 * MiB] * 4, pure=False))
    begun = time.monotonic()
    until(lambda: all(one.warm_bytes < 2 * MiB for one in client.run(report).values()), "warm memory stays")
    assert time.monotonic() - begun < 60


def test_spilled_results_are_charged_no_longer(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    futures = client.map(work.ones, [32 * MiB] * 64, pure=False)  # 2 GiB, on workers of 1 GiB each
    distributed.wait(futures)
    assert {future.status for future in futures} == {"finished"}
    assert sum(client.run(_spilled).values()) > 0
    assert in_use(client) < 1300 * MiB
    assert int(client.submit(_first, futures[0]).result()) == 1
    del futures
    until(lambda: in_use(client) < MiB, "spilled results stay charged")


def _spilled(dask_worker: Any) -> int:
    return len(dask_worker.data.slow)


def _first(array: Any) -> int:
    return int(array[0])


# ---- what is seen


def test_the_page_for_prometheus_has_prefixes_and_budget(client: Any) -> None:
    pytest.importorskip("prometheus_client")
    client.register_plugin(RequestPlugin(limit_bytes=16 * MiB))
    distributed.wait(client.map(work.total, [MiB] * 8 + [100 * MiB], pure=False))
    pages = []
    for info in client.scheduler_info()["workers"].values():
        port = info["services"]["dashboard"]
        host = info["host"]
        with urllib.request.urlopen(f"http://{host}:{port}/metrics") as page:
            pages.append(page.read().decode())
    assert all('ctxalloc_budget_limit_bytes{budget="worker ' in page for page in pages)
    assert all(page.count("# HELP ctxalloc_requests_total") == 1 for page in pages)
    assert any('ctxalloc_request_memory_peak_bytes_count{name="total"}' in page for page in pages)
    assert any('ctxalloc_requests_refused_total{name="total"}' in page for page in pages)


def test_the_summary_is_of_the_whole_cluster(client: Any) -> None:
    client.register_plugin(RequestPlugin(limit_bytes=64 * MiB))
    before = summary(client).series.get("spread")
    begun = 0 if before is None else before.requests
    distributed.wait(client.map(work.spread, [8 * MiB, 16 * MiB, 24 * MiB] * 10, pure=False))
    found = summary(client)
    assert found.series["spread"].requests - begun == 30
    assert found.series["spread"].max_peak_bytes >= 24 * MiB
    assert len(found.processes) == 2
    text = str(found)
    assert "spread" in text
    assert "processes" in text
    assert "<table>" in found._repr_html_()


def test_measured_peaks_suggest_limits_that_hold(client: Any) -> None:
    client.register_plugin(RequestPlugin())
    client.gather(client.map(work.ones, [5 * MiB] * 10, pure=False))
    distributed.wait(client.map(refused_always, range(2), pure=False))
    suggested = summary(client).suggest(headroom=1.5)
    limit = suggested["ones"].limit_bytes
    assert limit >= 1.5 * 5 * MiB
    assert limit % MiB == 0
    assert suggested["ones"].resources == {"memory": limit}
    assert "refused_always" not in suggested, "a task that was refused did not reach its peak"
    with pytest.raises(ValueError, match="headroom"):
        summary(client).suggest(headroom=0.5)


@pytest.mark.parametrize("headroom", [0.5, float("inf"), float("nan"), "x", None])
def test_a_headroom_that_is_not_possible_is_refused(headroom: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"suggest\(headroom="):
        Summary([]).suggest(headroom=headroom)


def test_a_summary_is_asked_of_a_client(client: Any) -> None:
    with pytest.raises(TypeError, match=r"summary\(.*\): give the client"):
        summary(client.cluster)


def refused_always(_: int) -> None:
    np.ones(100 << 30, np.uint8)


def test_workers_in_one_process_are_counted_once() -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(RequestPlugin())
        before = summary(client).series.get("where")
        client.gather(client.map(work.where, range(10), pure=False))
        found = summary(client)
        assert len(found.processes) == 1
        assert found.series["where"].requests - (0 if before is None else before.requests) == 10


def test_without_distributed_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['distributed'] = None; import ctxalloc.dask"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'distributed>=2024.12'" in done.stderr
