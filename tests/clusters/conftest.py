"""Tests with real clusters, in an environment of their own: `make test-clusters`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

WORKERS = 2
THREADS = 2

TIMEOUT_SECONDS = 180
"""Of each test, its fixtures included: one that hangs fails, says where every thread is, and the others still run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two workers, each a process with two threads. Tests put their own plugin in the place of the one before."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=WORKERS, threads_per_worker=THREADS, processes=True, memory_limit="1GiB", dashboard_address=":0"
    ) as made:
        yield made


@pytest.fixture
def client(cluster: Any) -> Iterator[Any]:
    """A client whose workers have no plugin, and nothing in memory."""
    import distributed

    with distributed.Client(cluster) as made:
        yield made
        if "ctxalloc" in made.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.worker_plugins)):
            made.unregister_worker_plugin("ctxalloc")
