"""The workload of `proof.py` on a local Ray: without ctxalloc its monitor kills the workers of greedy tasks.

The monitor is told to act at 2 GiB more than the machine uses, rather than to fill the machine.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from proof import TASK_LIMIT, Outcome, greedy, keep, modest, workload

import ctxalloc
import ctxalloc.ray
from ctxalloc import GiB, MiB

GREEDY_BYTES = 4 * GiB
ROOM_BYTES = 2 * GiB


def in_use(_: int) -> tuple[int, int]:
    """A worker, and what the arrays of its pools take."""
    time.sleep(0.01)  # the next one goes to another worker
    return os.getpid(), ctxalloc._native._pools()[0]


def answer(place: str, plugin: str, tasks: str, greedy_every: str) -> None:
    """In the process of a run: the workload; its outcome is left in a file."""
    with_plugin = plugin == "1"
    sizes, is_greedy = workload(int(tasks), int(greedy_every))
    env: dict[str, Any] = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    if with_plugin:
        env = ctxalloc.ray.runtime_env(limit_bytes=TASK_LIMIT, base=env)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 * MiB,
        log_to_driver=False,
        runtime_env=env,
        _system_config={
            "memory_usage_threshold": _share_in_use(),
            "memory_monitor_refresh_ms": 100,
            "task_oom_retries": 1,
        },
    )
    run_greedy, run_modest = ray.remote(greedy), ray.remote(modest)
    begun = time.monotonic()
    futures = [
        run_greedy.remote(GREEDY_BYTES, number) if is_greedy[number] else run_modest.remote(size, number)
        for number, size in enumerate(sizes)
    ]
    statuses = [_status(future) for future in futures]
    seconds = time.monotonic() - begun
    killed = sum(status == "OutOfMemoryError" for status in statuses)
    left = None
    if with_plugin:
        look = ray.remote(in_use)
        left = sum(dict(ray.get([look.remote(number) for number in range(100)])).values())
    ray.shutdown()
    keep(place, Outcome(statuses, is_greedy, killed, seconds, [], left))


def _share_in_use() -> float:
    """The part of the machine's memory at which the monitor is to act."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return min(0.95, (total - available + ROOM_BYTES) / total)


def _status(future: Any) -> str:
    try:
        ray.get(future)
    except ray.exceptions.RayTaskError as error:
        return type(error.cause).__name__
    except ray.exceptions.RayError as error:
        return type(error).__name__
    return "finished"
