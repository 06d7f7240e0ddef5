"""The example and the document that need a SYCL runtime: they print what they say."""

import subprocess
import sys
from pathlib import Path

import documents

ROOT = Path(__file__).parents[2]


def run(*arguments: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_service_prints_what_its_first_lines_say() -> None:
    example = ROOT / "examples" / "usm_service.py"
    assert run(example) == documents.said(example.read_text())


def test_the_python_in_the_document_runs_and_prints_what_it_says() -> None:
    run(ROOT / "tests" / "python" / "documents.py", ROOT / "docs" / "usm.md")
