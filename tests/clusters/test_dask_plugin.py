"""The plugin in Dask's workers: how it comes and goes, and where it cannot be."""

import asyncio
from pathlib import Path
from typing import Any

import dask
import dask.array
import distributed
import pytest
import work
from distributed import Client, LocalCluster

import ctxalloc
import ctxalloc.dask
from ctxalloc import MiB, TaskBudgetExceeded, _dask
from ctxalloc.dask import RequestPlugin, Summary, report, summary


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
