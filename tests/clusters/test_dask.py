"""Each task of Dask in a request of its own, on real workers: two processes with two threads each."""

import gc
import pickle
import traceback
from pathlib import Path
from typing import Any

import dask
import dask.array
import distributed
import numpy as np
import pytest
import work
from workers import in_use, until

import ctxalloc
import ctxalloc.dask
from ctxalloc import MiB, TaskBudgetExceeded
from ctxalloc.dask import RequestPlugin, report, summary

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
