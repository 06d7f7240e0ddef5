"""`mypy --strict` accepts what docs/services.md shows, as one program."""

import subprocess
import sys
from pathlib import Path

import pytest
from documents import blocks

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[2]


def test_mypy_accepts_the_guide(tmp_path: Path) -> None:
    shown = blocks((ROOT / "docs" / "services.md").read_text())
    program = tmp_path / "guide.py"
    program.write_text("\n".join(block.text for block in shown if block.language == "python"))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
