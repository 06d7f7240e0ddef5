"""What a request around each task of Dask costs: the call alone, small tasks end to end, patterns of dask.array.

Every variant runs in turn, round after round; medians are compared. The call alone is measured in this process, in
processor time: what the plugin does before a task and around it (aim: 20 us). The rest runs on a LocalCluster of one
process with two threads, to which the plugin is added, and from which it is taken, for each run (aim: 1.05x). Arrays of
requests live in the pool, which keeps memory warm, so patterns with large blocks should gain. Numbers go to
target/bench/clusters.json. Run it by `make bench-clusters`. Options: --rounds N, --quick.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import distributed
from dask._task_spec import Task
from harness import Loop, Row, keep, medians, rounds_asked, row_of, table

import ctxalloc
import ctxalloc.dask
from ctxalloc._tasks import Choice, Terms

AIM_CALL_NS = 20_000
AIM_PATTERN = 1.05


class _State:
    """As much of a worker's task as the plugin looks at."""

    annotations: dict[str, Any] | None = None
    key = "inc-1"
    prefix = "inc"

    def __init__(self, run_spec: Any) -> None:
        self.run_spec = run_spec


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
    spec = Task("inc-1", inc, 1)
    ready = Choice(Terms(limit_bytes=ctxalloc.GiB), "inc", ctxalloc.Budget(ctxalloc.GiB))
    attached = object.__new__(ctxalloc.dask._Attached)  # noqa: SLF001 - on no worker, but as one has it
    attached._prefixes, attached._terms, attached._ready = {}, Terms(), {"inc": ready}
    put, state = attached.put_into_request, _State

    def plain() -> Any:
        return spec({})

    def in_request() -> Any:
        task = state(spec)
        put(task)
        return task.run_spec({})

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


def in_turn(client: Any, work: Callable[[], Any], rounds: int) -> dict[str, Row]:
    """Without the plugin and with it, in turn."""
    times: dict[str, list[float]] = {"without": [], "with the plugin": []}
    for round_ in range(rounds + 1):
        for name, own in times.items():
            if name != "without":
                client.register_plugin(ctxalloc.dask.RequestPlugin(limit_bytes=ctxalloc.GiB))
            begun = time.perf_counter()
            work()
            took = time.perf_counter() - begun
            if name != "without":
                client.unregister_worker_plugin(ctxalloc.dask.NAME)
            if round_:  # the first one warms up
                own.append(took * 1e9)
    return {name: row_of(own) for name, own in times.items()}


def main() -> None:
    """Measures, prints and keeps."""
    rounds = rounds_asked(__doc__)
    found: dict[str, Any] = {"rounds": rounds, "call": call(rounds)}
    cluster_rounds = max(5, rounds // 2)
    with (
        dask.config.set({"distributed.worker.memory.spill": False, "distributed.worker.memory.target": False}),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, memory_limit="4GiB", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        works: dict[str, Callable[[], Any]] = {"1000 tasks that do nothing": lambda: small_tasks(client)}
        for text, blocks, edge in (("blocks of 2 MiB", 6, 512), ("blocks of 32 MiB", 3, 2048)):
            for name, pattern in patterns(blocks, edge).items():
                works[f"{name}, {text}"] = lambda pattern=pattern: pattern().compute()
        ratios = []
        for name, work in works.items():
            rows = in_turn(client, work, cluster_rounds)
            table(name, rows, "without")
            found[name] = rows
            ratios.append(rows["with the plugin"]["median_ns"] / rows["without"]["median_ns"])
        print(f"the largest ratio: {max(ratios):.2f} (aim: {AIM_PATTERN}), the median: {statistics.median(ratios):.2f}")
    keep("clusters", found)


if __name__ == "__main__":
    main()
