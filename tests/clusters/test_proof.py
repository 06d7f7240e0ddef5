"""What breaks workers without ctxalloc fails exactly the greedy tasks with it, among thousands of others."""

import proof
import pytest

from ctxalloc import MiB

# The workload's process has a limit of its own, and is killed at it.
pytestmark = pytest.mark.timeout(proof.LIMIT_SECONDS + 60)


def test_without_the_plugin_greedy_tasks_kill_workers() -> None:
    pytest.importorskip("distributed")
    found = proof.run(with_plugin=False, tasks=200, greedy_every=200)
    assert found.restarts >= 1
    assert "finished" not in found.counted(greedy=True)


def test_with_it_exactly_the_greedy_tasks_fail() -> None:
    pytest.importorskip("distributed")
    found = proof.run(with_plugin=True, tasks=3000, greedy_every=50)
    assert found.counted(greedy=True) == {"TaskBudgetExceeded": 60}
    assert found.counted(greedy=False) == {"finished": 2940}
    assert found.restarts == 0
    assert {sample.status for sample in found.samples} == {"running"}
    assert found.left_bytes == 0, "bytes stay charged when nobody wants a result"


def test_on_ray_without_it_greedy_tasks_kill_workers() -> None:
    pytest.importorskip("ray")
    found = proof.run(with_plugin=False, tasks=200, greedy_every=100, on="proof_ray")
    assert found.counted(greedy=True) == {"OutOfMemoryError": 2}


def test_on_ray_with_it_exactly_the_greedy_tasks_fail() -> None:
    pytest.importorskip("ray")
    found = proof.run(with_plugin=True, tasks=3000, greedy_every=50, on="proof_ray")
    assert found.counted(greedy=True) == {"TaskBudgetExceeded": 60}
    assert found.counted(greedy=False) == {"finished": 2940}
    # Of each worker, the pages of 64 KiB that blocks of each size are made in next.
    assert found.left_bytes is not None
    assert found.left_bytes < 8 * MiB
