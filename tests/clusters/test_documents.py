"""docs/clusters.md and the examples for clusters work as shown."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

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
    match = re.search(r"prints::\n\n((?:    .*\n)+)", example.read_text())
    assert match
    assert run_python(example) == textwrap.dedent(match[1])


def test_the_guide_runs_and_prints_what_it_says() -> None:
    run_python(ROOT / "tests" / "python" / "documents.py", ROOT / "docs" / "clusters.md")
