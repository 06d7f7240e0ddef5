"""What shows waiting runs: ``make demo-waiting``. And tasks of clusters do not wait."""

import subprocess
import sys
from pathlib import Path

import pytest

from ctxalloc._terms import Terms

pytestmark = [pytest.mark.once, pytest.mark.any_numpy]

ROOT = Path(__file__).parents[2]


def test_the_demo_of_a_queue_ends_well() -> None:
    command = [sys.executable, "-m", "examples.waiting", "--requests", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "5 waited" in done.stdout


@pytest.mark.parametrize("option", ["reserve_bytes", "timeout", "max_waiting"])
def test_terms_of_tasks_say_why_these_do_not_wait(option: str) -> None:
    with pytest.raises(TypeError, match="have the scheduler"):
        Terms().changed({option: 1}, "here")
