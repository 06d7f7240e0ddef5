"""Counters by name: as plain data, for Prometheus and OpenTelemetry, and of several processes at once."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import subprocesses
from asgi_calls import call, http

import ctxalloc
from ctxalloc import metrics

pytestmark = pytest.mark.any_numpy

# Its number is the layout's version.
METRICS_FILE = re.findall(
    r'PREFIX: &str = "(.*)"', (Path(__file__).parents[2] / "src/counters/place.rs").read_text("utf-8")
)[0]


def used(name: str, size: int = 1000) -> None:
    with ctxalloc.request(name=name):
        np.empty(size, np.uint8)


def test_a_route_is_counted_under_its_pattern() -> None:
    import asyncio

    from ctxalloc.asgi import AllocatorMiddleware

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        np.empty(5000, np.uint8)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    service = AllocatorMiddleware(app, routes={"/counted/{id}": ctxalloc.request()})
    for number in range(3):
        asyncio.run(call(service, http(f"/counted/{number}")))
    series = metrics.snapshot().series["/counted/{id}"]
    assert (series.requests, series.max_peak_bytes, series.peak_bytes.quantile(1)) == (3, 5000, 5086)
    assert not any(name.startswith("/counted/") and name != "/counted/{id}" for name in metrics.snapshot().series)


def test_a_refusal_that_was_answered_is_counted() -> None:
    with ctxalloc.request(name="refused here", limit_bytes=10_000), pytest.raises(MemoryError):
        np.empty(20_000, np.uint8)
    series = metrics.snapshot().series["refused here"]
    assert (series.requests, series.refused_requests, series.refused_allocations) == (1, 1, 1)


def test_present_requests_and_budgets_are_listed() -> None:
    tenant = ctxalloc.Budget(1 << 20, name="a tenant of this test")
    strategy = ctxalloc.strategies.Tracked(traceback=1)
    with ctxalloc.request(name="present", budget=tenant, limit_bytes=5000, strategy=strategy):
        kept = np.empty(3000, np.uint8)
        (one,) = [one for one in metrics.present() if one.name == "present"]
        assert (one.has_ended, one.live_bytes, one.limit_bytes, one.parent) == (False, 3000, 5000, tenant.name)
    (one,) = [one for one in metrics.present() if one.name == "present"]
    assert one.has_ended
    assert one.escapes is not None
    assert one.escapes[0].size_bytes == 3000
    (budget,) = [budget for budget in metrics.budgets() if budget.name == tenant.name]
    assert (budget.in_use_bytes, budget.limit_bytes, budget.parent) == (3000, 1 << 20, None)
    del kept
    assert not [one for one in metrics.present() if one.name == "present"]


def test_quantiles_refuse_what_is_none() -> None:
    used("quantiles")
    with pytest.raises(ValueError, match=r"quantile\(2\): give a number from 0 to 1"):
        metrics.snapshot().series["quantiles"].peak_bytes.quantile(2)


COUNTS = """
import os, sys, numpy as np, ctxalloc
def work(n):
    for _ in range(n):
        with ctxalloc.request(name="shared"):
            np.empty(1000, np.uint8)
"""


def test_processes_share_their_counters_and_sums_never_go_back(tmp_path: Path) -> None:
    program = COUNTS + (
        "import warnings; warnings.simplefilter('ignore')\n"
        "work(2)\n"
        "child = os.fork()\n"
        "if child == 0:\n    work(3); os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "s = ctxalloc.metrics.snapshot()\n"
        "print(s.series['shared'].requests, s.series['shared'].peak_bytes.count, len(s.processes))\n"
    )
    shared = {"CTXALLOC_METRICS_DIR": str(tmp_path)}
    assert subprocesses.says(program, **shared) == "5 5 1"
    assert subprocesses.says(program, **shared) == "10 10 1", "the next ones count on"
    assert len(list(tmp_path.iterdir())) == 2, "and take over the files of those that ended"


def test_a_child_of_fork_counts_its_own_requests() -> None:
    program = COUNTS + (
        "import warnings; warnings.simplefilter('ignore')\n"
        "work(2)\n"
        "child = os.fork()\n"
        "if child == 0:\n    work(3)\n"
        "    print(ctxalloc.metrics.snapshot().series['shared'].requests, flush=True)\n    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(ctxalloc.metrics.snapshot().series['shared'].requests)\n"
    )
    assert subprocesses.says(program).split() == ["3", "2"]


def test_a_worker_that_is_killed_leaves_its_counts(tmp_path: Path) -> None:
    program = COUNTS + "work(4); print('ready', flush=True); input()"
    environment = {**os.environ, "CTXALLOC_METRICS_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        worker.kill()
    reader = (
        COUNTS
        + "s = ctxalloc.metrics.snapshot(); print(s.series['shared'].requests, [p.live_requests for p in s.processes])"
    )
    assert subprocesses.says(reader, CTXALLOC_METRICS_DIR=str(tmp_path)) == "4 [0]"


def test_a_directory_that_is_none_is_refused_at_import(tmp_path: Path) -> None:
    outcome = subprocesses.run("import ctxalloc", CTXALLOC_METRICS_DIR=str(tmp_path / "missing"))
    assert outcome.code == 1
    assert f'CTXALLOC_METRICS_DIR="{tmp_path}/missing"' in outcome.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_with_the_name_of_a_metrics_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{METRICS_FILE}0")
    environment = {**os.environ, "CTXALLOC_METRICS_DIR": str(tmp_path)}
    program = COUNTS + "work(4); print(ctxalloc.metrics.snapshot().series['shared'].requests)"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "4\n"


def test_a_relative_directory_is_that_of_the_import(tmp_path: Path) -> None:
    program = (
        f"import os; os.chdir({str(tmp_path.parent)!r})\n{COUNTS}os.chdir('/')\nwork(2)\n"
        "print(ctxalloc.metrics.snapshot().series['shared'].requests)\n"
    )
    assert subprocesses.says(program, CTXALLOC_METRICS_DIR=tmp_path.name) == "2"
    assert list(tmp_path.iterdir())


def test_a_directory_that_vanishes_is_an_error_not_a_zero(tmp_path: Path) -> None:
    program = (
        "import os, ctxalloc\n"
        "os.rmdir(os.environ['CTXALLOC_METRICS_DIR'])\n"
        "with ctxalloc.request(): pass\n"
        "try:\n    ctxalloc.metrics.snapshot()\nexcept RuntimeError as error:\n    print(error)\n"
    )
    (tmp_path / "gone").mkdir()
    assert "CTXALLOC_METRICS_DIR" in subprocesses.says(program, CTXALLOC_METRICS_DIR=str(tmp_path / "gone"))


def test_a_file_has_memory_for_what_is_counted_in_it(tmp_path: Path) -> None:
    # Where a file may not grow, what is counted is counted without its size, and nobody ends by SIGBUS.
    program = COUNTS + (
        "import resource\n"
        "work(1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))\n"
        "for route in range(120):\n"
        "    for size in range(0, 20, 2):\n"
        "        with ctxalloc.request(name=f'route {route}'):\n"
        "            np.empty(1 << size, np.uint8)\n"
        "s = ctxalloc.metrics.snapshot().series\n"
        "last = s['route 119'].peak_bytes\n"
        "print(s['shared'].peak_bytes.buckets, last.count, last.quantile(0))\n"
    )
    assert subprocesses.says(program, CTXALLOC_METRICS_DIR=str(tmp_path)) == f"((1024, 1),) 10 {2**64 - 1}"
    (file,) = tmp_path.iterdir()
    assert 60_000 < file.stat().st_blocks * 512 < 200_000


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ctxalloc-metrics-3-0").write_bytes(b"not ours")
    program = COUNTS + "work(1); print(ctxalloc.metrics.snapshot().series['shared'].requests)"
    assert subprocesses.says(program, CTXALLOC_METRICS_DIR=str(tmp_path)) == "1"
    assert (tmp_path / "ctxalloc-metrics-3-0").read_bytes() == b"not ours"


def test_prometheus_reads_what_we_expose() -> None:
    client = pytest.importorskip("prometheus_client")
    parser = pytest.importorskip("prometheus_client.parser")
    used("exposed", 5000)
    used("at its bound", 16384)
    registry = client.CollectorRegistry()
    tenant = ctxalloc.Budget(1 << 20, name="exposed tenant")
    registry.register(ctxalloc.prometheus.Collector(budgets=[tenant]))
    text = client.generate_latest(registry).decode()
    found = {
        (sample.name, sample.labels.get("name"), sample.labels.get("le")): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["ctxalloc_requests_total", "exposed", None] == 1
    ends = {
        le: value
        for (metric, name, le), value in found.items()
        if metric.endswith("peak_bytes_bucket") and name == "exposed" and float(le or 0) <= 65536
    }
    assert ends == {"4870.0": 0, "5792.0": 1, "6888.0": 1, "8192.0": 1, "16384.0": 1, "65536.0": 1}
    assert found["ctxalloc_request_memory_peak_bytes_bucket", "exposed", "+Inf"] == 1
    assert found["ctxalloc_request_memory_peak_bytes_bucket", "at its bound", "16384.0"] == 1
    assert found["ctxalloc_request_memory_peak_bytes_sum", "exposed", None] == 5000
    assert found["ctxalloc_processes", None, None] == 1
    assert 'ctxalloc_budget_limit_bytes{budget="exposed tenant"} 1.048576e+06' in text
    openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
    exposition = pytest.importorskip("prometheus_client.openmetrics.exposition")
    assert list(openmetrics.text_string_to_metric_families(exposition.generate_latest(registry).decode()))


def test_what_prometheus_could_not_tell_apart_is_refused() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(ctxalloc.prometheus.Collector())
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(ctxalloc.prometheus.Collector())
    same = [ctxalloc.Budget(1, name="same"), ctxalloc.Budget(2, name="same")]
    with pytest.raises(ValueError, match="two are named 'same'"):
        ctxalloc.prometheus.Collector(budgets=same)
    with pytest.raises(TypeError, match=r"1 is not a ctxalloc\.Budget"):
        ctxalloc.prometheus.Collector(budgets=[1])  # type: ignore[list-item]


def test_a_bound_that_is_no_power_of_two_is_refused() -> None:
    pytest.importorskip("prometheus_client")
    for bounds in ([1000], [2048, 1024], [0], [1 << 64]):
        with pytest.raises(ValueError, match="give powers of two in increasing order"):
            ctxalloc.prometheus.Collector(bounds_bytes=bounds)


def test_open_telemetry_reads_what_we_observe() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    used("observed", 5000)
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    ctxalloc.opentelemetry.instrument(provider)
    data = reader.get_metrics_data()
    found: dict[str, Any] = {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }

    def value(name: str, **wanted: str) -> float:
        points = found[name].data.data_points
        attributes = {key.replace("_", "."): text for key, text in wanted.items()}
        return sum(point.value for point in points if attributes.items() <= dict(point.attributes).items())

    name = {"ctxalloc_request_name": "observed"}
    assert value("ctxalloc.request.count", **name) == 1
    assert value("ctxalloc.request.memory.allocated", **name) == 5000
    assert value("ctxalloc.request.memory.peak.bucket", **name, le="16384") == 1
    assert value("ctxalloc.request.memory.peak.bucket", **name, le="4096") == 0
    assert found["ctxalloc.request.count"].data.is_monotonic
    assert not found["ctxalloc.memory.used"].data.is_monotonic
    assert found["ctxalloc.memory.used"].unit == "By"
    provider.shutdown()


def test_a_library_that_is_missing_is_named_with_its_install() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None; sys.modules['opentelemetry'] = None\n"
        "import ctxalloc\n"
        "for make in (ctxalloc.prometheus.Collector, ctxalloc.opentelemetry.instrument):\n"
        "    try:\n        make()\n    except ModuleNotFoundError as error:\n        print(error)\n"
    )
    said = subprocesses.says(program)
    assert "pip install prometheus_client" in said
    assert "pip install opentelemetry-api" in said


def test_coverage_sees_pools_and_says_what_it_does_not() -> None:
    before = ctxalloc.coverage()
    with ctxalloc.use("pool"):
        array = np.ones(64 << 20, np.uint8)
    during = ctxalloc.coverage()
    # What earlier tests left in this thread's cache may have gone back meanwhile.
    assert 63 << 20 < during.pools_in_use_bytes - before.pools_in_use_bytes < 65 << 20
    unseen = bytearray(64 << 20)
    unseen[::4096] = b"1" * len(unseen[::4096])
    outside = ctxalloc.coverage()
    assert 60 << 20 < outside.unseen_bytes - during.unseen_bytes < 80 << 20
    del array, unseen


def test_coverage_subtracts_what_is_in_memory_and_not_what_was_asked_for() -> None:
    program = (
        "import numpy as np, ctxalloc\n"
        "before = ctxalloc.coverage()\n"
        "with ctxalloc.request(strategy=ctxalloc.strategies.Pool()):\n"
        "    untouched = np.zeros(50_000_000)\n"
        "    touched = np.ones(2_000_000)\n"
        "kept = bytearray(b'x') * 200_000_000\n"
        "after = ctxalloc.coverage()\n"
        "print(round((after.unseen_bytes - before.unseen_bytes) / 1e7), after.pools_in_use_bytes > 400_000_000)\n"
        "print(14_000_000 < after.error_bytes - before.error_bytes < 40_000_000)\n"
    )
    assert subprocesses.says(program) == "20 True\nTrue"


def test_coverage_splits_what_tracemalloc_traces() -> None:
    program = (
        "import tracemalloc, numpy as np, ctxalloc\n"
        "assert ctxalloc.coverage().traced_arrays_bytes is None\n"
        "tracemalloc.start()\n"
        "a = np.empty(10_000_000, np.uint8)\n"
        "with ctxalloc.use('pool'): b = np.empty(5_000_000, np.uint8)\n"
        "k = bytearray(2_000_000)\n"
        "c = ctxalloc.coverage()\n"
        "print(c.traced_arrays_bytes // 1_000_000, c.traced_buffers_bytes, c.traced_other_bytes // 1_000_000)\n"
    )
    assert subprocesses.says(program) == "15 0 2"


UNSEEN = """
import contextvars, ctypes, threading
import ctxalloc, numpy as np
from ctxalloc import MiB

np.ones(40 * MiB, np.uint8)                                # what is loaded at first use
with ctxalloc.request():
    np.ones(40 * MiB, np.uint8)

def measured(work):
    with ctxalloc.request(measure_unseen=True) as request:
        kept = work()
    assert request.unseen_growth_bytes is not None, work
    print(round(request.unseen_growth_bytes / (16 * MiB)))
    return kept

kept = measured(lambda: bytearray(b"x") * (64 * MiB))      # Python's own
del kept
measured(lambda: np.ones(64 * MiB, np.uint8))              # seen: it goes through the handler
measured(lambda: None)

with ctxalloc.request(measure_unseen=True) as late:
    assert late.unseen_growth_bytes is None                # not before the end
with ctxalloc.request() as plain:
    pass
with ctxalloc.request():                                   # not alone: inside of another one
    with ctxalloc.request(measure_unseen=True) as nested:
        pass
with ctxalloc.request(measure_unseen=True) as outer:       # requests inside are part of it
    with ctxalloc.request():
        pass
with ctxalloc.request(measure_unseen=True) as crowded:     # another root meanwhile
    with ctxalloc.request(root=True):
        pass
def elsewhere():
    with ctxalloc.request():
        pass
def in_a_thread(context):
    thread = threading.Thread(target=context.run, args=(elsewhere,))
    thread.start()
    thread.join()
with ctxalloc.request(measure_unseen=True) as beside:      # another one in another thread
    in_a_thread(contextvars.Context())
with ctxalloc.request(measure_unseen=True) as carried:     # one inside of it, in another thread
    in_a_thread(contextvars.copy_context())
requests = (late, plain, nested, outer, crowded, beside, carried)
print([request.unseen_growth_bytes is not None for request in requests])
"""


def test_growth_beside_the_pools_is_measured_where_a_request_is_alone() -> None:
    grown, seen, nothing, known = subprocesses.says(UNSEEN).splitlines()
    assert (grown, seen, nothing) == ("4", "0", "0")
    assert known == "[True, False, False, True, False, False, True]"
