"""`mypy --strict` and pyright accept what docs/services.md shows, as one program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from documents import blocks

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "services.md").read_text()


def program(text: str) -> str:
    return "\n".join(block.text for block in blocks(text) if block.language == "python")


def test_mypy_accepts_the_guide(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "guide.py").write_text(program(GUIDE))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", tmp_path / "guide.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_pyright_accepts_the_guide(tmp_path: Path) -> None:
    """Without Django's part: it has no types, and pyright makes some up."""
    pytest.importorskip("pyright")
    before, _, rest = GUIDE.partition("## Django")
    (tmp_path / "guide.py").write_text(program(before + rest.partition("\n## ")[2]))
    options = {"extraPaths": [str(ROOT / "python")], "pythonVersion": "3.11", "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "guide.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "0 errors" in checked.stdout, checked.stdout + checked.stderr
