"""``%%ctxalloc`` in a real shell of IPython."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.any_numpy, pytest.mark.once]
SHELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in sys.argv[1:]:
    result = shell.run_cell(cell, store_history=True)
    print("ok" if result.success else "failed")
"""


def shown(folder: Path, *cells: str) -> str:
    pytest.importorskip("IPython")
    done = subprocess.run(
        [sys.executable, "-c", SHELL, "import numpy as np", *cells],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "IPYTHONDIR": str(folder), "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def test_a_cells_arrays_are_reported_by_its_lines(tmp_path: Path) -> None:
    text = shown(
        tmp_path,
        "%load_ext ctxalloc",
        "%%ctxalloc --handler pool\ndef work():\n    return np.ones(1 << 20, np.uint8)\nkept = [work(), work()]\n3 + 4",
        "%%ctxalloc\n1/0",
        "%%ctxalloc\nimport asyncio\nawait asyncio.sleep(0)\nmore = np.ones(5 << 20, np.uint8)",
        "len(kept)",
    )
    assert "2 MiB at the peak" in text, text
    assert re.search(r"^Out\[\d+\]: 7$|^7$", text, re.MULTILINE), text
    assert re.search(r"  pool +2 MiB", text), text
    assert re.search(r"  2 MiB +2 MiB .*:2 work", text), text
    assert "ZeroDivisionError" in text
    assert "5 MiB at the peak" in text, text
    assert "default_allocator" in text  # the handler was the first cell's only


def test_wrong_options_are_named_and_the_extension_can_be_unloaded(tmp_path: Path) -> None:
    text = shown(
        tmp_path,
        "%load_ext ctxalloc",
        "%%ctxalloc --handler nope\n1",
        "%%ctxalloc --sites 0\n1",
        "%unload_ext ctxalloc",
        "%%ctxalloc\n1",
    )
    assert "no handler is named 'nope'" in text, text
    assert "--sites 0: give 1 or more" in text
    assert "Cell magic `%%ctxalloc` not found" in text


def test_a_cell_that_fails_fails_and_shows_it_once(tmp_path: Path) -> None:
    raises = "def own():\n    raise KeyError('its own')\nown()"
    cells = ("1/0", "3 +", "await nothing", raises, "import sys\nsys.exit(3)")
    text = shown(tmp_path, "%load_ext ctxalloc", *(f"%%ctxalloc\nkept = 1\n{cell}" for cell in cells), "%%ctxalloc\n3")
    assert text.count("failed\n") == len(cells), text
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert text.count("SyntaxError: invalid syntax") == 1
    assert text.count("NameError: name 'nothing' is not defined") == 1
    assert text.count("KeyError: 'its own'") == 1
    assert text.count("arrays: 0 B at the peak") == len(cells) + 1
    assert "run_cell_async" not in text
