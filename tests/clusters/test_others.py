"""Pools of processes, joblib with scikit-learn, and Celery: an initializer, a decorator, a base class."""

import concurrent.futures
import multiprocessing
import pickle
import threading
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


def test_in_a_process_of_a_pool_a_wrapped_thread_is_in_its_request() -> None:
    context = multiprocessing.get_context("spawn")
    initializer = process_initializer(name="mine")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=initializer) as pool:
        assert pool.submit(_names_in_threads).result() == [None, "mine"]


def _names_in_threads() -> list[str | None]:
    found: list[str | None] = []
    for target in (_name, ctxalloc.wrap(_name)):
        thread = threading.Thread(target=target, args=(found,))
        thread.start()
        thread.join()
    return found


def _name(found: list[str | None]) -> None:
    found.append(work.where()[0])


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
    wrong: Any
    for wrong in (3, b"mine"):
        with pytest.raises(TypeError, match=r"process_initializer\(name="):
            process_initializer(name=wrong)
    for wrong in ({"strict": "x"}, {"handler": 3}):
        with pytest.raises(TypeError, match="process_initializer: "):
            process_initializer(**wrong)


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


_TRIED: list[int] = []


def _less_the_third_time(size_bytes: int) -> int:
    _TRIED.append(size_bytes)
    return work.total(size_bytes if len(_TRIED) < 3 else MiB)


def _always_too_much(self: Any, size_bytes: int) -> int:
    _TRIED.append(self.request.retries)
    return work.total(size_bytes)


@pytest.fixture
def celery_worker() -> Iterator[Any]:
    """A worker of Celery in a thread, with a broker in memory."""
    celery = pytest.importorskip("celery")
    from celery.contrib.testing.worker import start_worker

    from ctxalloc.celery import RequestTask, RunRefused

    retried = {"autoretry_for": (RunRefused,), "max_retries": 2, "default_retry_delay": 0}
    app = celery.Celery("tests", broker="memory://", backend="cache+memory://")
    app.task(name="total", base=RequestTask, limit_bytes=16 * MiB)(work.total)
    app.task(name="where", base=RequestTask)(work.where)
    app.task(name="impossible", base=RequestTask, limit_bytes=-1)(work.where)
    app.task(name="again", base=RequestTask, limit_bytes=16 * MiB, **retried)(_less_the_third_time)
    app.task(name="never", base=RequestTask, limit_bytes=16 * MiB, bind=True, **retried)(_always_too_much)
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


def test_a_refused_run_of_celery_is_retried(celery_worker: Any) -> None:
    from ctxalloc.celery import RunRefused

    _TRIED.clear()
    assert celery_worker.tasks["again"].delay(100 * MiB).get(timeout=60) == MiB
    assert len(_TRIED) == 3
    _TRIED.clear()
    with pytest.raises(RunRefused, match="budget 'never' has no room"):
        celery_worker.tasks["never"].delay(100 * MiB).get(timeout=60)
    assert _TRIED == [0, 1, 2]


def test_a_refused_run_of_celery_says_all_that_its_cause_says(celery_worker: Any) -> None:
    from ctxalloc.celery import RunRefused

    tasks = celery_worker.tasks
    with pytest.raises(RunRefused) as raised:
        tasks["total"].delay(100 * MiB).get(timeout=60)
    assert (raised.value.never_fits, raised.value.of_request, raised.value.held_bytes) == (True, True, 0)
    assert raised.value.budget_id is None, "it means nothing in the client"
    with pytest.raises(RunRefused, match="task 'total': budget 'total'") as direct:
        tasks["total"](100 * MiB)
    cause = direct.value.__cause__
    assert isinstance(cause, ctxalloc.TaskBudgetExceeded)
    assert vars(direct.value) == vars(cause)
    assert pickle.loads(pickle.dumps(direct.value)).never_fits
