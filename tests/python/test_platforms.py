"""What platforms.mk runs on other machines, as far as this one can tell."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent.parent

WITHOUT_HYPOTHESIS = """
import sys, pytest

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "hypothesis":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.exit(pytest.main(["-p", "no:hypothesispytest", "-p", "no:cacheprovider", "--collect-only", "-q", *sys.argv[1:]]))
"""


def test_the_bare_suite_needs_no_hypothesis() -> None:
    """The CPython with musl cannot install it (`make test-musl-python`)."""
    (names,) = re.findall(r"^bare_suite := ((?:.*\\\n)*.*)$", (ROOT / "platforms.mk").read_text(), re.MULTILINE)
    files = [ROOT / f"tests/python/test_{name}.py" for name in names.replace("\\", "").split()]
    assert len(files) > 15
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HYPOTHESIS, *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_classifiers_name_every_python_that_was_tested() -> None:
    """A wheel's page on an index shows them; docs/development.md says which were tested."""
    table = (ROOT / "docs" / "development.md").read_text()
    tested = set(re.findall(r"^\| CPython (3\.\d+)\S* \| tested \|", table, re.MULTILINE))
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()))
    assert tested
    assert tested <= named
