"""What breaks workers without the plugin fails exactly the greedy tasks with it, among thousands of others."""

import pytest

pytest.importorskip("distributed")

import proof


def test_without_the_plugin_greedy_tasks_kill_workers() -> None:
    found = proof.run(with_plugin=False, tasks=200, greedy_every=200)
    assert found.restarts >= 1
    assert "finished" not in found.counted(greedy=True)


def test_with_it_exactly_the_greedy_tasks_fail() -> None:
    found = proof.run(with_plugin=True, tasks=3000, greedy_every=50)
    assert found.counted(greedy=True) == {"TaskBudgetExceeded": 60}
    assert found.counted(greedy=False) == {"finished": 2940}
    assert found.restarts == 0
    assert {sample.status for sample in found.samples} == {"running"}
    assert found.left_bytes == 0, "bytes stay charged when nobody wants a result"
