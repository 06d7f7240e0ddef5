"""The site's reference has a place for each public name. `make site` builds it, and checks every link."""

import runpy
from pathlib import Path

import pytest

import ctxalloc

pytestmark = pytest.mark.once

REFERENCE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "site" / "reference.py"))


def test_each_public_name_of_the_package_has_its_topic() -> None:
    placed = [name for names in REFERENCE["TOPICS"].values() for name in names]
    modules = {name for name in ctxalloc.__all__ if name in REFERENCE["MODULES"]}
    assert sorted(placed) == sorted(set(ctxalloc.__all__) - modules)


def test_each_public_module_of_the_package_has_its_page() -> None:
    package = Path(ctxalloc.__file__).parent
    files = {path.stem for path in package.glob("[!_]*.py")}
    folders = {path.parent.name for path in package.glob("[!_]*/__init__.py")}
    assert set(REFERENCE["MODULES"]) == files | folders
