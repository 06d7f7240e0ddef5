"""Each task of Ray in a request of its own, and Ray's `memory=` as its limit: a greedy one fails, its worker goes on.

Needs `pip install ray`; a local Ray is started here. It prints::

    modest: 1048576
    greedy: refused, a RayTaskError too: True
    measured: 2 runs of '__main__.collect', 1 refused
"""

import os
import sys

import numpy as np
import ray

import ctxalloc
import ctxalloc.ray


@ray.remote(memory=64 * ctxalloc.MiB)  # type: ignore[untyped-decorator] # where Ray is not installed
def collect(count: int) -> int:
    """Collects arrays of a MiB."""
    return sum(array.nbytes for array in [np.zeros(ctxalloc.MiB, np.uint8) for _ in range(count)])


def main() -> None:
    """Runs it twice."""
    runtime_env = ctxalloc.ray.runtime_env(
        limit_bytes="memory", base={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    )
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", runtime_env=runtime_env)
    print("modest:", ray.get(collect.remote(1)))
    try:
        ray.get(collect.remote(1000))
    except ctxalloc.TaskBudgetExceeded as refused:
        print("greedy: refused, a RayTaskError too:", isinstance(refused, ray.exceptions.RayTaskError))
    (series,) = ctxalloc.ray.report().series.values()
    print(f"measured: {series.requests} runs of {series.name!r}, {series.refused_requests} refused")
    ray.shutdown()


if __name__ == "__main__":
    main()
