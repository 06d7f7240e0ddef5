"""docs/clusters.md and the examples for clusters work as shown."""

import subprocess
import sys
from pathlib import Path

import documents
import pytest

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "library"), [("dask_tasks.py", "distributed"), ("ray_tasks.py", "ray")])
def test_an_example_prints_what_its_first_lines_say(name: str, library: str) -> None:
    pytest.importorskip(library)
    example = ROOT / "examples" / name
    assert run_python(example) == documents.said(example.read_text())


def test_the_guide_runs_and_prints_what_it_says() -> None:
    run_python(ROOT / "tests" / "python" / "documents.py", ROOT / "docs" / "clusters.md")
