"""`record=` for the workers of Dask, Ray and Celery: tasks by name, a file for each worker, and errors that say why."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import work
from celery_worker import lines_of_client

from ctxalloc import MiB
from ctxalloc._trace import Trace

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, and of Celery's dependencies

TASKS = 400
"""One in ten is recorded."""


def recorded(path: Path) -> tuple[Counter[str], Trace]:
    """How many requests of each name it has, and all of it."""
    trace = Trace(path)
    names = trace.recording.names
    return Counter(names[numbers[0]] for kind, numbers in events(trace) if kind == "begin"), trace


def events(trace: Trace) -> list[tuple[str, list[int]]]:
    """What happened, and its numbers."""
    return [(kind, numbers) for _at, _thread, _request, kind, numbers in trace.recording.events(0, 1_000_000)]


# ---- Dask


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, memory_limit="1GiB", dashboard_address=":0"
        ) as made,
        distributed.Client(made) as client,
    ):
        yield client


def test_dasks_workers_record_their_tasks_by_prefix(workers: Any, tmp_path: Path) -> None:
    from ctxalloc.dask import RequestPlugin

    for name in ("first", "second"):
        path = tmp_path / name
        workers.register_plugin(RequestPlugin(record=path, limit_bytes=64 * MiB))
        workers.gather(workers.map(work.total, [MiB] * TASKS, pure=False))
        workers.unregister_worker_plugin("ctxalloc")
        workers.gather(workers.map(work.total, [MiB] * TASKS, pure=False))
        names, trace = recorded(path)
        assert set(names) == {"total"}
        assert 5 <= names["total"] <= TASKS / 2
        assert trace.recording.header[8] == 2, "both workers"
        assert not trace.recording.is_cut_off, "it is complete once the plugin is removed"
        peaks = [numbers[0] for kind, numbers in events(trace) if kind == "end"]
        assert all(MiB <= peak < MiB + 100 for peak in peaks), "the array and its sum"


def test_a_worker_that_cannot_record_fails_its_tasks(workers: Any, tmp_path: Path) -> None:
    from ctxalloc.dask import RequestPlugin

    (tmp_path / "text").write_text("no recording")
    with pytest.raises(OSError, match="no recording of this version"):
        workers.register_plugin(RequestPlugin(record=tmp_path / "text"))
    with pytest.raises(OSError, match="no recording of this version"):
        workers.submit(work.total, MiB, pure=False).result()
    workers.unregister_worker_plugin("ctxalloc")
    assert workers.submit(work.total, MiB, pure=False).result() == MiB
    for wrong in (5, b"trace", True):
        with pytest.raises(TypeError, match=r"RequestPlugin: record="):
            RequestPlugin(record=wrong)  # type: ignore[arg-type] # what is tested


# ---- Ray


def test_rays_workers_record_their_tasks_by_name(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    import ctxalloc.ray

    (tmp_path / "text").write_text("no recording")
    base = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * MiB,
        log_to_driver=False,
        runtime_env=ctxalloc.ray.runtime_env(record=tmp_path / "trace", base=base),
    )
    try:
        total = ray.remote(work.total)
        assert ray.get([total.remote(MiB) for _ in range(TASKS)]) == [MiB] * TASKS
        other = total.options(runtime_env=ctxalloc.ray.runtime_env(record=tmp_path / "text", base=base))
        with pytest.raises(OSError, match="no recording of this version"):
            ray.get(other.remote(MiB))
    finally:
        ray.shutdown()
    names, trace = recorded(tmp_path / "trace")
    assert set(names) == {"work.total"}
    assert 5 <= names["work.total"] <= TASKS / 2
    assert 1 <= trace.recording.header[8] <= 4
    with pytest.raises(TypeError, match="runtime_env: record=5 is no path"):
        ctxalloc.ray.runtime_env(record=5)  # type: ignore[arg-type] # what is tested


# ---- Celery

CELERY = """
import celery
import work
from ctxalloc.celery import RequestTask
folders = {name: f"{FOLDER}/queue" for name in ("data_folder_in", "data_folder_out")}
app = celery.Celery("tasks", broker="filesystem://", backend=f"file://{FOLDER}/results")
app.conf.broker_transport_options = {**folders, "control_folder": f"{FOLDER}/control"}
app.conf.worker_prefetch_multiplier = 100
def summed(count):
    return sum(total.run(1 << 20) for _ in range(count))
total = app.task(name="total", base=RequestTask, record=f"{FOLDER}/trace")(work.total)
many = app.task(name="many", base=RequestTask, record=f"{FOLDER}/trace")(summed)
wrong = app.task(name="wrong", base=RequestTask, record=f"{FOLDER}/tasks.py")(work.total)
no_path = app.task(name="no path", base=RequestTask, record=7)(work.total)
"""

CLIENT = """
from tasks import many, no_path, wrong
results = [many.delay(40) for _ in range(10)]
print(sum(result.get(timeout=100) for result in results))
for task in (wrong, no_path):
    try:
        task.delay(1 << 20).get(timeout=100)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_celerys_worker_records_its_runs_by_name(tmp_path: Path) -> None:
    pytest.importorskip("celery")
    lines = lines_of_client(tmp_path, CELERY, CLIENT, processes=2)
    assert lines[0] == str(TASKS * MiB)
    assert lines[1].startswith("OSError"), lines
    assert "tasks.py" in lines[1]
    assert lines[2].startswith("TypeError RequestTask: record=7 is no path")
    names, _trace = recorded(tmp_path / "trace")
    assert set(names) <= {"many", "total"}
    assert 5 <= names["total"] <= TASKS / 2
