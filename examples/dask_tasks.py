"""Each task of Dask in a request of its own: a greedy one fails, its worker and the others go on.

Needs `pip install 'dask[distributed]'`; two workers are started here, as processes. It prints::

    the others: 40 finished
    greedy: task 'collect' of 'collect' refused: 64 MiB are the limit
    workers: the same as before
    suggested for 'blur': 2 MiB
"""

import dask.distributed
import numpy as np

import ctxalloc
import ctxalloc.dask


def blur(seed: int) -> float:
    """A task like most: a MiB for a moment."""
    picture = np.full((256, 512), float(seed))
    return float(picture.mean())


def collect(count: int) -> int:
    """One that takes too much."""
    return len([np.zeros(ctxalloc.MiB, np.uint8) for _ in range(count)])


def main() -> None:
    """Runs both kinds side by side."""
    with (
        dask.distributed.LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0") as cluster,
        dask.distributed.Client(cluster) as client,
    ):
        client.register_plugin(ctxalloc.dask.RequestPlugin(limit_bytes=64 * ctxalloc.MiB))
        before = {report.pid for report in client.run(ctxalloc.dask.report).values()}
        greedy = client.submit(collect, 1000, key="collect")
        blurred = client.map(blur, range(40))
        print("the others:", len(client.gather(blurred)), "finished")
        try:
            greedy.result()
        except ctxalloc.TaskBudgetExceeded as refused:
            limit = refused.limit_bytes // ctxalloc.MiB
            print(f"greedy: task {refused.key!r} of {refused.prefix!r} refused: {limit} MiB are the limit")
        after = {report.pid for report in client.run(ctxalloc.dask.report).values()}
        print("workers:", "the same as before" if before == after else "restarted")
        suggested = ctxalloc.dask.summary(client).suggest(headroom=1.5)["blur"]
        print(f"suggested for 'blur': {suggested.limit_bytes // ctxalloc.MiB} MiB")


if __name__ == "__main__":
    main()
