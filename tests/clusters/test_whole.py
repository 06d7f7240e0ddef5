"""`whole=True` in the workers of Dask, Ray and Celery: native memory and Python objects of each task, or an error."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from celery_worker import lines_of_client

import ctxalloc
from ctxalloc import MiB, TaskBudgetExceeded, _native, process_initializer

if _native._whole_library() is None:
    pytest.skip("Linux with glibc, and the feature `whole`", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, and of Celery's dependencies

NOT_LOADED = "its library is not loaded"
FOLDER = str(Path(__file__).parent)


def decoded(numbers: int) -> int:
    """Objects of a size that no array has."""
    return len(json.loads("[" + '"' + "x" * 1000 + '", ' + "0," * numbers + '"' + "y" * (3 * MiB) + '"]'))


def kept_bytes() -> int | None:
    """How many bytes of objects the running request has."""
    request = ctxalloc.current_request()
    kept = bytearray(3 * MiB)
    whole = None if request is None else request.stats.whole
    return None if whole is None else whole.object_bytes - len(kept)


def pid() -> int:
    return os.getpid()


@pytest.fixture(scope="module")
def library() -> str:
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return made.stdout.strip()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Dask's nannies change that of the process that they are in, and heed it before Dask's configuration."""
    os.environ.pop("LD_PRELOAD", None)
    yield
    os.environ.pop("LD_PRELOAD", None)


# ---- Dask


@pytest.fixture
def clients(library: str, request: Any) -> Iterator[Any]:
    """A client of one worker, whose environment has the library or not."""
    distributed = pytest.importorskip("distributed")
    import dask

    environment = {"distributed.nanny.pre-spawn-environ.LD_PRELOAD": library} if request.param else {}
    with (
        dask.config.set(environment),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=True, memory_limit="2GiB", dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("clients", [True], indirect=True)
def test_a_task_of_dask_is_held_to_the_limit_of_all_its_memory(clients: Any) -> None:
    import dask

    from ctxalloc.dask import RequestPlugin

    clients.register_plugin(RequestPlugin(whole=True, limit_bytes=16 * MiB))
    before = clients.submit(pid, pure=False).result()
    assert clients.submit(decoded, 10, pure=False).result() == 12
    with pytest.raises(TaskBudgetExceeded):
        clients.submit(decoded, 10_000_000, pure=False).result()
    assert 0 <= clients.submit(kept_bytes, pure=False).result() < 2 * MiB
    assert clients.submit(pid, pure=False).result() == before, "the worker lives"
    with dask.annotate(ctxalloc={"whole": False}):
        assert dask.delayed(kept_bytes)().compute() is None


@pytest.mark.parametrize("clients", [False], indirect=True)
def test_a_worker_of_dask_without_the_library_says_so(clients: Any) -> None:
    import dask

    from ctxalloc.dask import RequestPlugin

    with pytest.raises(RuntimeError, match=NOT_LOADED):
        clients.register_plugin(RequestPlugin(whole=True))
    with pytest.raises(RuntimeError, match=NOT_LOADED):
        clients.submit(pid, pure=False).result()
    clients.register_plugin(RequestPlugin())
    with dask.annotate(ctxalloc={"whole": True}), pytest.raises(RuntimeError, match=NOT_LOADED):
        dask.delayed(pid)().compute()
    assert clients.submit(pid, pure=False).result() > 0


# ---- Ray


def test_ray_starts_workers_with_the_library_or_their_tasks_fail(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    import ctxalloc.ray

    def base() -> dict[str, Any]:
        return {"env_vars": {"PYTHONPATH": os.pathsep.join([FOLDER, *sys.path])}}

    whole = ctxalloc.ray.runtime_env(whole=True, limit_bytes=16 * MiB, base=base())
    without = ctxalloc.ray.runtime_env(functions={"test_whole.pid": {"whole": True}}, base=base())
    assert "libctxalloc_whole" in without["env_vars"]["LD_PRELOAD"]
    without["env_vars"]["LD_PRELOAD"] = ""  # as where a node does not have the file
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * MiB, log_to_driver=False, runtime_env=whole)
    try:
        [run, kept, number] = [ray.remote(function) for function in (decoded, kept_bytes, pid)]
        assert ray.get(run.remote(10)) == 12
        with pytest.raises(TaskBudgetExceeded):
            ray.get(run.remote(10_000_000))
        assert 0 <= ray.get(kept.remote()) < 2 * MiB
        with pytest.raises(RuntimeError, match=NOT_LOADED):
            ray.get(number.options(runtime_env=without).remote())
        assert ray.get(kept.options(runtime_env=without).remote()) is None
    finally:
        ray.shutdown()


# ---- Celery

CELERY = """
import json
import celery
import ctxalloc
from ctxalloc.celery import RequestTask
folders = {name: f"{FOLDER}/queue" for name in ("data_folder_in", "data_folder_out")}
app = celery.Celery("tasks", broker="filesystem://", backend=f"file://{FOLDER}/results")
app.conf.broker_transport_options = {**folders, "control_folder": f"{FOLDER}/control"}
def decoded(numbers):
    return len(json.loads("[" + "0," * numbers + '"' + "y" * (3 << 20) + '"]'))
whole = app.task(name="whole", base=RequestTask, whole=True, limit_bytes=16 << 20)(decoded)
"""

CLIENT = """
import sys
from tasks import whole
for numbers in (10, 10_000_000, 10):
    try:
        print(whole.delay(numbers).get(timeout=100))
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "not loaded"])
def test_a_run_of_celery_is_whole_in_a_worker_that_forks(tmp_path: Path, library: str, is_loaded: bool) -> None:
    pytest.importorskip("celery")
    preload = {"LD_PRELOAD": library} if is_loaded else {}
    lines = lines_of_client(tmp_path, CELERY, CLIENT, processes=1, environ=preload)
    if is_loaded:
        assert [lines[0], lines[2]] == ["11", "11"]
        assert lines[1].startswith("RunRefused")
    else:
        assert len(lines) == 3
        assert all(line.startswith("RuntimeError") and NOT_LOADED in line for line in lines), lines


# ---- pools of processes


def test_a_process_of_a_pool_is_whole_or_its_pool_is_broken(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("spawn")
    begin = process_initializer(whole=True, limit_bytes=64 * MiB)
    with ProcessPoolExecutor(1, mp_context=context, initializer=begin) as pool, pytest.raises(BrokenProcessPool):
        pool.submit(pid).result()
    monkeypatch.setenv("LD_PRELOAD", library)
    with ProcessPoolExecutor(1, mp_context=context, initializer=begin) as pool:
        assert pool.submit(decoded, 10).result() == 12
        with pytest.raises(MemoryError):
            pool.submit(decoded, 10_000_000).result()
        assert 0 <= pool.submit(kept_bytes).result() < 30 * MiB
        assert pool.submit(decoded, 10).result() == 12
