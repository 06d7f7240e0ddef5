"""Pools of processes, joblib with scikit-learn, and Celery: an initializer, a decorator, a base class."""

import concurrent.futures
import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import work

import ctxalloc
from ctxalloc import MiB, process_initializer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Celery's dependencies


def test_a_process_of_a_pool_has_a_limit_of_its_own() -> None:
    initializer = process_initializer(limit_bytes=64 * MiB, name="mine")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=initializer) as pool:
        assert pool.submit(work.total, MiB).result() == MiB
        with pytest.raises(MemoryError):
            pool.submit(work.total, 100 * MiB).result()
        assert pool.submit(work.where).result()[0] == "mine", "the process goes on"
    with context.Pool(1, initializer) as other:
        assert other.apply(work.total, (MiB,)) == MiB
        with pytest.raises(MemoryError):
            other.apply(work.total, (100 * MiB,))


def test_a_process_of_a_pool_has_a_handler_of_its_own() -> None:
    context = multiprocessing.get_context("spawn")
    initializer = process_initializer(handler="aligned64")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=initializer) as pool:
        assert pool.submit(work.handler_of_new).result() == "aligned64"


def test_an_initializer_pickles_and_says_what_is_wrong() -> None:
    pickle.loads(pickle.dumps(process_initializer(limit_bytes=MiB)))
    with pytest.raises(ValueError, match="nothing to limit"):
        process_initializer(limit_bytes=MiB, handler="pool")
    with pytest.raises((TypeError, ValueError, OverflowError), match=r"process_initializer: .*limit_bytes"):
        process_initializer(limit_bytes=-1)


def test_joblib_with_loky_takes_both() -> None:
    joblib = pytest.importorskip("joblib")
    limited = ctxalloc.request(limit_bytes=16 * MiB, name="task")(work.total)
    with joblib.parallel_config("loky", n_jobs=2, initializer=process_initializer(limit_bytes=64 * MiB, name="mine")):
        names = joblib.Parallel()(joblib.delayed(work.where)() for _ in range(8))
        assert {name for name, _ in names} == {"mine"}
        assert joblib.Parallel()(joblib.delayed(limited)(MiB) for _ in range(4)) == [MiB] * 4
        with pytest.raises(ctxalloc.BudgetExceeded, match="budget 'task' has no room"):
            joblib.Parallel()(joblib.delayed(limited)(32 * MiB) for _ in range(4))
        with pytest.raises(MemoryError):
            joblib.Parallel()(joblib.delayed(work.total)(100 * MiB) for _ in range(4))


def test_scikit_learn_fits_in_it() -> None:
    joblib = pytest.importorskip("joblib")
    sklearn = pytest.importorskip("sklearn.ensemble")
    made = np.random.default_rng(5)
    samples, classes = made.normal(size=(200, 8)), made.integers(0, 2, 200)
    initializer = process_initializer(limit_bytes=256 * MiB, name="fit")
    with joblib.parallel_config("loky", n_jobs=2, initializer=initializer):
        model = sklearn.BaggingClassifier(n_estimators=8, random_state=0, n_jobs=2).fit(samples, classes)
        assert model.score(samples, classes) > 0.5
        assert {name for name, _ in joblib.Parallel(n_jobs=2)(joblib.delayed(work.where)() for _ in range(4))} == {
            "fit"
        }


@pytest.fixture
def celery_worker() -> Iterator[Any]:
    """A worker of Celery in a thread, with a broker in memory."""
    celery = pytest.importorskip("celery")
    from celery.contrib.testing.worker import start_worker

    from ctxalloc.celery import RequestTask

    app = celery.Celery("tests", broker="memory://", backend="cache+memory://")
    app.task(name="total", base=RequestTask, limit_bytes=16 * MiB)(work.total)
    app.task(name="where", base=RequestTask)(work.where)
    app.task(name="impossible", base=RequestTask, limit_bytes=-1)(work.where)
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        yield app


def test_each_run_of_a_celery_task_is_in_a_request(celery_worker: Any) -> None:
    from ctxalloc.celery import RunRefused

    tasks = celery_worker.tasks
    assert tasks["where"].delay().get(timeout=60) == ["where", 0]
    assert tasks["total"].delay(MiB).get(timeout=60) == MiB
    refused = tasks["total"].delay(100 * MiB)
    with pytest.raises(RunRefused, match="budget 'total' has no room") as raised:
        refused.get(timeout=60)
    assert not isinstance(raised.value, MemoryError), "Celery ends a worker for one"
    assert (raised.value.key, raised.value.prefix) == (refused.id, "total")
    assert tasks["total"].delay(MiB).get(timeout=60) == MiB, "the worker goes on"
    with pytest.raises(Exception, match="limit_bytes"):
        tasks["impossible"].delay().get(timeout=60)
