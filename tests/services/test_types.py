"""`mypy --strict` and pyright accept what README.md and docs/services.md show, each as one program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from documents import blocks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "services.md").read_text()


def program(text: str) -> str:
    return "\n".join(block.text for block in blocks(text) if block.language == "python")


def without_django(guide: str) -> str:
    """It has no types, and pyright makes some up."""
    before, _, rest = guide.partition("## Django")
    return before + rest.partition("\n## ")[2]


@pytest.mark.parametrize("document", [README, GUIDE], ids=["README.md", "docs/services.md"])
def test_mypy_accepts_what_is_shown(document: str, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "shown.py").write_text(program(document))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", tmp_path / "shown.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("document", [README, without_django(GUIDE)], ids=["README.md", "docs/services.md"])
def test_pyright_accepts_what_is_shown(document: str, tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "shown.py").write_text(program(document))
    options = {"extraPaths": [str(ROOT / "python")], "pythonVersion": "3.11", "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "shown.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "0 errors" in checked.stdout, checked.stdout + checked.stderr
