"""The example and the document that need a SYCL runtime: they print what they say."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_service_prints_what_its_first_lines_say() -> None:
    example = ROOT / "examples" / "usm_service.py"
    said = re.search(r"prints::\n\n((?:    .*\n)+)", example.read_text())
    assert said is not None
    assert run(example) == textwrap.dedent(said[1])


def test_the_python_in_the_document_runs_and_prints_what_it_says() -> None:
    run(ROOT / "tests" / "python" / "documents.py", ROOT / "docs" / "usm.md")
