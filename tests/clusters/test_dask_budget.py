"""What Dask's workers hold: results, the budget over all tasks, and what is seen of both."""

import subprocess
import sys
import time
import urllib.request
from typing import Any

import distributed
import numpy as np
import pytest
import work
from distributed import Client, LocalCluster
from workers import in_use, until

import ctxalloc
import ctxalloc.dask
from ctxalloc import MiB, TaskBudgetExceeded
from ctxalloc.dask import RequestPlugin, Summary, report, summary

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
