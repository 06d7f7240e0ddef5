"""What shows waiting runs: ``make demo-waiting``. And tasks of clusters do not wait."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ctxalloc
from ctxalloc import _page
from ctxalloc._terms import Terms

pytestmark = [pytest.mark.once, pytest.mark.any_numpy]

ROOT = Path(__file__).parents[2]


def test_the_demo_of_a_queue_ends_well() -> None:
    command = [sys.executable, "-m", "examples.waiting", "--requests", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "5 waited" in done.stdout


@pytest.mark.parametrize("option", ["reserve_bytes", "timeout", "max_waiting"])
def test_terms_of_tasks_say_why_these_do_not_wait(option: str) -> None:
    with pytest.raises(TypeError, match="have the scheduler"):
        Terms().changed({option: 1}, "here")


def test_exporters_and_the_page_show_who_waits_and_who_waited() -> None:
    client = pytest.importorskip("prometheus_client")
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    budget = ctxalloc.Budget(1000, name="shown")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    ctxalloc.opentelemetry.instrument(provider)
    registry = client.CollectorRegistry()
    registry.register(ctxalloc.prometheus.Collector(budgets=[budget]))

    async def work(**terms: float) -> None:
        async with ctxalloc.request(budget=budget, reserve_bytes=600, root=True, name="shown waiting", **terms):
            pass

    async def main() -> None:
        async with ctxalloc.request(budget=budget, reserve_bytes=600, root=True):
            waiting = asyncio.create_task(work())
            while budget.waiting == 0:  # noqa: ASYNC110 - the queue has no event
                await asyncio.sleep(0)
            page = client.generate_latest(registry).decode()
            assert 'ctxalloc_budget_waiting{budget="shown"} 1.0' in page
            assert 'ctxalloc_budget_reserved_bytes{budget="shown"} 600.0' in page
            shown = [one for one in _page.numbers()["waiting"] if one["budget_id"] == budget.id]
            assert [(one["name"], one["reserve_bytes"]) for one in shown] == [("shown waiting", 600)]
            with pytest.raises(ctxalloc.NoRoom):
                await work(timeout=0)
        await waiting

    asyncio.run(main())
    lines = client.generate_latest(registry).decode().splitlines()
    for line in (
        'ctxalloc_requests_timed_out_total{name="shown waiting"} 1.0',
        'ctxalloc_requests_turned_away_total{name="shown waiting"} 0.0',
        'ctxalloc_request_wait_microseconds_count{name="shown waiting"} 1.0',
    ):
        assert line in lines
    data = reader.get_metrics_data()
    names = {
        metric.name
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    wanted = ("waiting", "timed_out", "turned_away", "wait.bucket", "wait.sum")
    assert {f"ctxalloc.request.{name}" for name in wanted} <= names
    assert {"ctxalloc.room.victims", "ctxalloc.room.reclaimed"} <= names
    provider.shutdown()
    route = next(one for one in _page.numbers()["routes"] if one["name"] == "shown waiting")
    assert (route["waited"], route["timed_out"]) == (1, 1)


def test_exporters_and_the_page_show_what_was_done_to_make_room() -> None:
    client = pytest.importorskip("prometheus_client")
    process = ctxalloc.Budget(100_000, name="made room")
    tenant = ctxalloc.Budget(parent=process, name="has a cache")
    cache: list[object] = []
    tenant.add_reclaimer(lambda _: cache.clear())
    registry = client.CollectorRegistry()
    registry.register(ctxalloc.prometheus.Collector(budgets=[process]))
    before = ctxalloc.metrics.made_room()
    with ctxalloc.request(budget=tenant, root=True):
        cache.append(np.ones(5000))
        assert process.reclaim(1) == 40_000
    assert (process.reclaimed_bytes, process.victims, tenant.reclaimed_bytes) == (40_000, 0, 0)
    assert ctxalloc.metrics.made_room().reclaimed_bytes >= before.reclaimed_bytes + 40_000
    [listed] = [one for one in ctxalloc.metrics.budgets() if one.id == process.id]
    assert (listed.victims, listed.reclaimed_bytes) == (0, 40_000)
    page = client.generate_latest(registry).decode()
    assert 'ctxalloc_budget_reclaimed_bytes_total{budget="made room"} 40000.0' in page
    assert 'ctxalloc_budget_victims_total{budget="made room"} 0.0' in page
    [line] = [line for line in page.splitlines() if line.startswith("ctxalloc_room_reclaimed_bytes_total ")]
    assert float(line.split()[1]) >= before.reclaimed_bytes + 40_000
    [shown] = [one for one in _page.numbers()["budgets"] if one["id"] == process.id]
    assert shown["reclaimed_bytes"] == 40_000


def test_the_page_counts_those_who_wait_for_a_part_of_a_request_too() -> None:
    before = _page.numbers()["waiting_count"]
    with ctxalloc.request(name="whole work", root=True) as outer:
        part = ctxalloc.Budget(1000, parent=outer.budget, name="part")

    async def work() -> None:
        async with ctxalloc.request(budget=part, reserve_bytes=600, root=True):
            pass

    async def main() -> None:
        async with ctxalloc.request(budget=part, reserve_bytes=600, root=True):
            waiting = [asyncio.create_task(work()) for _ in range(3)]
            while part.waiting < 3:  # noqa: ASYNC110 - the queue has no event
                await asyncio.sleep(0)
            shown = _page.numbers()
            assert shown["waiting_count"] == before + 3
            assert len([one for one in shown["waiting"] if one["budget"] == "part"]) == 3
        await asyncio.gather(*waiting)

    asyncio.run(main())
    assert _page.numbers()["waiting_count"] == before
