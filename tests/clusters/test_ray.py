"""Each task of Ray, and each call of an actor's method, in a request of its own, in a real local Ray."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import work

import ctxalloc.ray
from ctxalloc import MiB, TaskBudgetExceeded

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its dependencies

OPTIONS: dict[str, Any] = {
    "limit_bytes": "memory",
    "functions": {
        "work.spread": {"limit_bytes": 16 * MiB},
        "work.handler_of_new": {"handler": "aligned64"},
        "work.where_async": None,
        "test_ray.nothing": None,
    },
}


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    """Ray on this machine, whose workers run each task in a request."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * MiB,
        log_to_driver=False,
        runtime_env=ctxalloc.ray.runtime_env(**OPTIONS, base={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}),
    )
    yield ray
    ray.shutdown()


def remote(function: Any, **options: Any) -> Any:
    return ray.remote(**options)(function) if options else ray.remote(function)


class AsyncStore:
    """An asynchronous actor: its calls are tasks of one event loop."""

    def __init__(self) -> None:
        self.arrived = 0
        self.all_here = asyncio.Event()

    async def together(self, others: int) -> tuple[str | None, int | None]:
        """Waits until that many calls are here at the same time."""
        kept = work.np.ones(MiB)
        self.arrived += 1
        if self.arrived == others:
            self.all_here.set()
        await self.all_here.wait()
        request = ctxalloc.current_request()
        return (None, None) if request is None else (request.name, request.stats.peak_bytes // kept.nbytes)

    async def total(self, size_bytes: int) -> int:
        return work.total(size_bytes)

    async def keep_and_wait(self, size_bytes: int) -> int:
        """Never ends."""
        kept = work.ones(size_bytes)
        self.all_here.set()
        await asyncio.Event().wait()
        return int(kept.nbytes)

    async def begun(self) -> None:
        """Waits until the one above has its array."""
        await self.all_here.wait()


class Streams:
    def parts(self, sizes: list[int]) -> Iterator[int]:
        """A streaming generator."""
        for size in sizes:
            yield work.total(size)


def test_a_task_is_in_a_request_named_after_its_function(local: Any) -> None:
    where = remote(work.where)
    assert local.get([where.remote() for _ in range(20)]) == [("work.where", 0)] * 20


def test_without_a_declared_memory_there_is_no_limit(local: Any) -> None:
    assert local.get(remote(work.total).remote(200 * MiB)) == 200 * MiB


def test_declared_memory_is_a_limit(local: Any) -> None:
    total = remote(work.total, memory=64 * MiB)
    assert local.get(total.remote(32 * MiB)) == 32 * MiB
    with pytest.raises(TaskBudgetExceeded, match="has no room") as refused:
        local.get(total.remote(100 * MiB))
    assert isinstance(refused.value, ray.exceptions.RayTaskError)
    error = refused.value.cause
    assert (error.prefix, error.limit_bytes, error.requested_bytes) == ("work.total", 64 * MiB, 100 * MiB)
    assert len(str(error.key)) == 48, "a task's id"


def test_the_worker_of_a_refused_task_goes_on(local: Any) -> None:
    pid = remote(work.pid)
    before = set(local.get([pid.remote() for _ in range(20)]))
    greedy = remote(work.total, memory=16 * MiB, max_retries=0)
    for _ in range(10):
        with pytest.raises(TaskBudgetExceeded):
            local.get(greedy.remote(100 * MiB))
    after = set(local.get([pid.remote() for _ in range(20)]))
    assert before & after, "no worker of before is left"


def test_exactly_the_greedy_tasks_fail(local: Any) -> None:
    total = remote(work.total, memory=16 * MiB)
    sizes = [100 * MiB if number % 10 == 3 else 1 + number for number in range(100)]
    failed = []
    for size, future in [(size, total.remote(size)) for size in sizes]:
        try:
            assert local.get(future) == size
        except TaskBudgetExceeded:
            failed.append(size)
    assert failed == [size for size in sizes if size == 100 * MiB]


def test_terms_by_function(local: Any) -> None:
    spread = remote(work.spread)
    assert local.get(spread.remote(8 * MiB)) == 8
    with pytest.raises(TaskBudgetExceeded):
        local.get(spread.remote(32 * MiB))
    assert local.get(remote(work.handler_of_new).remote()) == "aligned64"
    assert local.get(remote(nothing).remote()) == (None, None)


def nothing() -> tuple[str | None, int | None]:
    return work.where()


WITHOUT_THE_HOOK = """
import os, sys
import ray, work
import ctxalloc.ray
from ctxalloc import MiB
env = ctxalloc.ray.runtime_env
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * MiB,
         runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
total, store = ray.remote(work.total), ray.remote(work.Store)
def end(reference):
    try:
        return ray.get(reference, timeout=100)
    except Exception as error:
        return type(getattr(error, "cause", error)).__name__, str(error)
print(end(total.remote(100 * MiB)) == 100 * MiB)
print(end(total.options(runtime_env=env(limit_bytes=16 * MiB)).remote(100 * MiB))[0])
print(end(total.options(memory=64 * MiB, runtime_env=env(limit_bytes="memory")).remote(100 * MiB))[0])
actor = store.options(runtime_env=env(limit_bytes=16 * MiB)).remote()
print(end(actor.add.remote(100 * MiB))[0])
name, text = end(total.options(runtime_env=env(handler="nope")).remote(1))
print(name, "no handler is named 'nope'" in text)
for sent in ("garbage", "[1]", '{"functions": [1]}'):
    wrong = env()
    wrong["env_vars"]["CTXALLOC_RAY"] = sent
    name, text = end(total.options(runtime_env=wrong).remote(1))
    print(name, f"CTXALLOC_RAY={sent!r} in the environment is not what" in text)
"""


def test_terms_of_a_task_hold_without_a_hook_of_the_job() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_HOOK], capture_output=True, text=True, check=False, env=env
    )
    assert done.stdout.splitlines() == [
        "True",
        *["TaskBudgetExceeded"] * 3,
        "UnknownHandlerError True",
        "ValueError True",
        "TypeError True",
        "TypeError True",
    ], done.stderr


def test_methods_of_an_actor_are_in_requests_of_their_own(local: Any) -> None:
    store = remote(work.Store).remote()
    assert local.get(store.where.remote()) == ("Store.where", 0)
    assert local.get(store.add.remote(MiB)) == 2


def test_what_an_actor_keeps_counts_for_its_declared_memory(local: Any) -> None:
    store = remote(work.Store, memory=64 * MiB).remote()
    assert local.get(store.add.remote(40 * MiB)) == 2
    with pytest.raises(TaskBudgetExceeded) as refused:
        local.get(store.add.remote(40 * MiB))
    assert (refused.value.cause.budget, refused.value.cause.prefix) == ("actor Store", "Store.add")
    assert local.get(store.add.remote(MiB)) == 3, "the actor lives"


def test_calls_of_an_asynchronous_actor_have_requests_of_their_own(local: Any) -> None:
    store = remote(AsyncStore).remote()
    answers = local.get([store.together.remote(4) for _ in range(4)])
    assert answers == [("AsyncStore.together", 1)] * 4
    limited = remote(AsyncStore, memory=64 * MiB).remote()
    with pytest.raises(TaskBudgetExceeded):
        local.get(limited.total.remote(100 * MiB))
    assert local.get(limited.total.remote(MiB)) == MiB


def test_a_cancelled_call_of_an_asynchronous_actor_is_charged_no_longer(local: Any) -> None:
    store = remote(AsyncStore, memory=64 * MiB).remote()
    waits = store.keep_and_wait.remote(40 * MiB)
    local.get(store.begun.remote())
    with pytest.raises(TaskBudgetExceeded):
        local.get(store.total.remote(40 * MiB))
    local.cancel(waits)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        local.get(waits)
    assert local.get(store.total.remote(40 * MiB)) == 40 * MiB


def test_a_task_that_makes_tasks_has_them_in_requests_of_their_own(local: Any) -> None:
    with pytest.raises(TaskBudgetExceeded) as refused:
        local.get(remote(makes_a_task, memory=64 * MiB).remote())
    assert refused.value.cause.prefix == "work.total", "the inner one's own name"


def makes_a_task() -> int:
    kept = work.ones(40 * MiB)
    total = remote(work.total, memory=64 * MiB, num_cpus=0)
    assert ray.get(total.remote(40 * MiB)) == kept.nbytes
    return int(ray.get(total.remote(100 * MiB)))


def test_calls_of_a_threaded_actor_have_requests_of_their_own(local: Any) -> None:
    store = remote(work.Store, max_concurrency=4).remote()
    assert local.get([store.where.remote() for _ in range(40)]) == [("Store.where", 0)] * 40


def test_a_streaming_generator_is_in_one_request(local: Any) -> None:
    actor = remote(Streams, memory=64 * MiB).remote()
    stream = actor.parts.options(num_returns="streaming").remote([1, 2, 3])
    assert [local.get(part) for part in stream] == [1, 2, 3]
    refused = actor.parts.options(num_returns="streaming").remote([1, 100 * MiB])
    assert local.get(next(refused)) == 1
    with pytest.raises(TaskBudgetExceeded):
        local.get(next(refused))


def test_the_report_has_the_functions_of_all_workers(local: Any) -> None:
    before = ctxalloc.ray.report().series.get("work.ones")
    ones = remote(work.ones)
    local.get([ones.remote(3 * MiB) for _ in range(10)])
    found = ctxalloc.ray.report()
    assert found.series["work.ones"].requests - (0 if before is None else before.requests) == 10
    assert found.series["work.ones"].max_peak_bytes >= 3 * MiB
    assert not [name for name in found.series if "_read" in name], "what asks is no task of the user's"
    assert "work.ones" in str(found)
    assert found.suggest()["work.ones"].limit_bytes >= 4 * MiB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_bytes": "all"}, "'memory' or None"),
        ({"limit_bytes": -1}, "limit_bytes"),
        ({"limit_bytes": "memory", "handler": "pool"}, "nothing to limit"),
        ({"functions": {"f": {"limit": 1}}}, r"functions=\{'f': \.\.\.\}"),
        ({"functions": [1]}, r"functions=\.\.\.\): \[1\] has no terms; give a dict"),
        ({"functions": {1: None}}, r"functions=\.\.\.\): \[1\] are no names"),
        ({"base": 5}, "base=5.: give a runtime_env"),
        ({"base": {"worker_process_setup_hook": "mine.setup"}}, "'mine.setup'; Ray takes one"),
    ],
    ids=str,
)
def test_an_option_that_is_not_possible_is_refused_where_it_is_written(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError), match=message):
        ctxalloc.ray.runtime_env(**options)


def test_a_release_without_the_variable_of_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ray._private.ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR")
    with pytest.raises(RuntimeError, match="does not know ray"):
        ctxalloc.ray.runtime_env()


def test_what_the_environment_had_before_is_kept() -> None:
    env = ctxalloc.ray.runtime_env(base={"env_vars": {"A": "1"}, "working_dir": "."})
    assert env["env_vars"]["A"] == "1"
    assert env["working_dir"] == "."


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.9.3")
    with pytest.raises(RuntimeError, match=r"does not know ray 2\.9\.3.*decorate the functions"):
        ctxalloc.ray.setup()


def test_without_ray_the_call_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import ctxalloc.ray; ctxalloc.ray.report()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install ray" in done.stderr
