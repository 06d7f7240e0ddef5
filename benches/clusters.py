"""What a request around each task of Dask costs: the call alone, small tasks end to end, patterns of dask.array.

Every variant runs in turn, round after round; medians are compared. The call alone is measured in this process, in
processor time: what the plugin does at each step of a task, and around it (aim: 20 us). The rest runs on a LocalCluster
of one process with two threads, to which the plugin is added, and from which it is taken, for each run (aim: 1.05x):
time passed, and the worker's processor time, which says more on a busy machine. Arrays of requests live in the pool,
which keeps memory warm, so patterns with large blocks should gain; `handler="pool"` is the pool without an account.
Numbers go to target/bench/clusters.json. Run it by `make bench-clusters`. Options: --rounds N, --quick.
"""

import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import distributed
from dask._task_spec import Task
from harness import Loop, Row, keep, medians, rounds_asked, row_of, table

import ctxalloc
import ctxalloc.dask
from ctxalloc import _dask
from ctxalloc._tasks import Choice, Terms

AIM_CALL_NS = 20_000
AIM_PATTERN = 1.05


STEPS = [
    ("released", "waiting"),
    ("waiting", "ready"),
    ("ready", "executing"),
    ("executing", "memory"),
    ("memory", "released"),
    ("released", "forgotten"),
]
"""The states that a worker takes a task through; the plugin is called for each."""


def inc(number: int) -> int:
    return number + 1


def processor_time(body: Callable[[], Any]) -> Loop:
    """As the harness's loop, by this thread's time on a processor: a few us are to be told on a busy machine too."""

    def run(count: int) -> float:
        begun = time.thread_time_ns()
        for _ in range(count):
            body()
        return (time.thread_time_ns() - begun) / count

    return run


def call(rounds: int) -> dict[str, Row]:
    """A task's call, as it is and in a request."""
    key, spec = "inc-1", Task("inc-1", inc, 1)
    task = types.SimpleNamespace(annotations=None, key=key, prefix="inc", run_spec=spec)
    plugin = ctxalloc.dask.RequestPlugin()
    ready = Choice(Terms(limit_bytes=ctxalloc.GiB), "inc", ctxalloc.Budget(ctxalloc.GiB))
    attached = object.__new__(_dask.Attached)  # on no worker, but as one has it
    attached._prefixes, attached._terms, attached._ready = {}, Terms(), {"inc": ready}
    worker = types.SimpleNamespace(state=types.SimpleNamespace(tasks={key: task}))
    vars(plugin).update(_attached=attached, _worker=worker)
    transition = plugin.transition

    def plain() -> Any:
        return spec({})

    def in_request() -> Any:
        task.run_spec = spec
        for start, finish in STEPS[:3]:
            transition(key, start, finish, stimulus_id="")
        result = task.run_spec({})
        for start, finish in STEPS[3:]:
            transition(key, start, finish, stimulus_id="")
        return result

    variants = {"a task's call": processor_time(plain), "the same, in a request": processor_time(in_request)}
    rows = medians(variants, rounds, 2000)
    table("a task that does nothing", rows, "a task's call")
    more = rows["the same, in a request"]["median_ns"] - rows["a task's call"]["median_ns"]
    print(f"the plugin adds {more / 1000:.1f} us to a task (aim: {AIM_CALL_NS / 1000:.0f} us)")
    return rows


def small_tasks(client: Any) -> Any:
    """A thousand tasks that do nothing."""
    return client.gather(client.map(inc, range(1000), pure=False))


def patterns(blocks: int, edge: int) -> dict[str, Callable[[], Any]]:
    """Some of those that Dask's own benchmarks and documentation have, on random arrays."""

    def array() -> Any:
        return da.random.default_rng(1).random((blocks * edge, blocks * edge), chunks=(edge, edge))

    def anomaly() -> Any:
        x = array()
        return ((x - x.mean(axis=0)) ** 2).sum()

    def transposed() -> Any:
        x = array()
        return (x + x.T).mean()

    def elementwise() -> Any:
        x = array()
        return (da.sqrt(x) * 2 - x / 3).std()

    def rechunked() -> Any:
        return array().rechunk((blocks * edge, edge // blocks)).max()

    return {
        "sum of squared anomalies": anomaly,
        "x + x.T, mean": transposed,
        "elementwise, std": elementwise,
        "rechunk, max": rechunked,
    }


def processor_seconds() -> float:
    """Of the worker's process."""
    return time.process_time()


def in_turn(client: Any, work: Callable[[], Any], rounds: int) -> tuple[dict[str, Row], dict[str, Row]]:
    """Without the plugin and with it, in turn: time passed, and the worker's processor time."""
    plugins = {
        "without": None,
        "with the plugin": ctxalloc.dask.RequestPlugin(limit_bytes=ctxalloc.GiB),
        'with handler="pool"': ctxalloc.dask.RequestPlugin(handler="pool"),
    }
    passed: dict[str, list[float]] = {name: [] for name in plugins}
    used: dict[str, list[float]] = {name: [] for name in plugins}
    for round_ in range(rounds + 1):
        for name, plugin in plugins.items():
            if plugin is not None:
                client.register_plugin(plugin)
            (before,) = client.run(processor_seconds).values()
            begun = time.perf_counter()
            work()
            took = time.perf_counter() - begun
            (after,) = client.run(processor_seconds).values()
            if plugin is not None:
                client.unregister_worker_plugin(ctxalloc.dask.NAME)
            if round_:  # the first one warms up
                passed[name].append(took * 1e9)
                used[name].append((after - before) * 1e9)
    return {name: row_of(own) for name, own in passed.items()}, {name: row_of(own) for name, own in used.items()}


def main() -> None:
    """Measures, prints and keeps."""
    rounds = rounds_asked(__doc__)
    found: dict[str, Any] = {"rounds": rounds, "call": call(rounds)}
    cluster_rounds = max(5, rounds // 2)
    with (
        dask.config.set({"distributed.worker.memory.spill": False, "distributed.worker.memory.target": False}),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, memory_limit="4GiB", dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        works: dict[str, Callable[[], Any]] = {"1000 tasks that do nothing": lambda: small_tasks(client)}
        for text, blocks, edge in (("blocks of 2 MiB", 6, 512), ("blocks of 32 MiB", 3, 2048)):
            for name, pattern in patterns(blocks, edge).items():
                works[f"{name}, {text}"] = lambda pattern=pattern: pattern().compute()
        ratios: dict[str, list[float]] = {"passed": [], "the worker's processor": []}
        for name, work in works.items():
            found[name] = {}
            for (kind, own), rows in zip(ratios.items(), in_turn(client, work, cluster_rounds), strict=True):
                table(f"{name}: time {kind}", rows, "without")
                found[name][kind] = rows
                own.append(rows["with the plugin"]["median_ns"] / rows["without"]["median_ns"])
        for kind, own in ratios.items():
            print(
                f"time {kind}: the largest ratio {max(own):.2f} (aim: {AIM_PATTERN}), the median "
                f"{statistics.median(own):.2f}"
            )
    keep("clusters", found)


if __name__ == "__main__":
    main()
