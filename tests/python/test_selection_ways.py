"""The ways to select: NumPy's ContextVar by C calls, by its methods, and the fallback through `SetHandler`.

The way is chosen at import; `CTXALLOC_SELECTION` asks for one. Each must pass the very same tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import subprocesses

# These tests need none of the plugins that are installed, which take a second to import.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
WAYS = ["contextvar", "contextvar-methods", "sethandler"]
HERE = Path(__file__).parent
SELECTION_TESTS = [
    "test_use.py",
    "test_use_generators.py",
    "test_use_async_generators.py",
    "test_set_reset.py",
    "test_one_truth.py",
    "test_crossings.py",
    "test_crossings_awaited.py",
]


def test_the_best_way_is_chosen_unasked() -> None:
    # NumPy's variable is found in all versions that we know; a newer one that hides it needs a look at selection.rs.
    program = "import ctxalloc; print(ctxalloc._native.selection)"
    environment = {key: value for key, value in os.environ.items() if key != "CTXALLOC_SELECTION"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stdout.strip() == "contextvar"


@pytest.mark.parametrize("way", WAYS)
def test_a_way_that_is_asked_for_is_taken(way: str) -> None:
    program = "import ctxalloc; print(ctxalloc._native.selection)"
    assert subprocesses.says(program, CTXALLOC_SELECTION=way) == way


@pytest.mark.long
@pytest.mark.parametrize("way", [way for way in WAYS if way != "contextvar"])
def test_the_selection_tests_pass_another_way(way: str) -> None:
    # `contextvar` itself is what all other tests here run with.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            *(str(HERE / name) for name in SELECTION_TESTS),
        ],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        env={**os.environ, "CTXALLOC_SELECTION": way, "RUST_BACKTRACE": "0", "PYTEST_ADDOPTS": "", **ALONE},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("wish", ["contextvars", "SETHANDLER", " ", "ö"])
def test_an_unknown_wish_is_refused_with_the_ways_there_are(wish: str) -> None:
    outcome = subprocesses.run("import ctxalloc", CTXALLOC_SELECTION=wish)
    assert outcome.code == 1
    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith(f'ImportError: the environment says CTXALLOC_SELECTION="{wish}", which is not possible')
    assert all(way in last for way in WAYS)


def test_a_wish_that_is_no_text_is_refused_too() -> None:
    outcome = subprocesses.run("import ctxalloc", CTXALLOC_SELECTION=os.fsdecode(b"\xff"))
    assert outcome.code == 1
    assert "ImportError: the environment says CTXALLOC_SELECTION=" in outcome.err


def test_an_empty_wish_is_none() -> None:
    assert (
        subprocesses.says("import ctxalloc; print(ctxalloc._native.selection)", CTXALLOC_SELECTION="") == "contextvar"
    )


def test_a_numpy_that_hides_its_variable_is_served_through_set_handler() -> None:
    # As if a later NumPy kept its handler elsewhere: no Context shows the variable.
    program = """
import contextvars
class Hidden:
    def __init__(self, context): self.context = context
    def run(self, *arguments): return self.context.run(*arguments)
    def items(self): return [item for item in self.context.items() if item[0].name != "current_allocator"]
real = contextvars.copy_context
contextvars.copy_context = lambda: Hidden(real())
import ctxalloc
contextvars.copy_context = real
print(ctxalloc._native.selection)
with ctxalloc.use("aligned64"):
    assert ctxalloc.current().name == ctxalloc.get_handler_name() == "aligned64"
assert ctxalloc.current().name == "default_allocator"
"""
    assert subprocesses.says(program) == "sethandler"
    outcome = subprocesses.run(program, CTXALLOC_SELECTION="contextvar")
    assert outcome.code == 1
    assert (
        'ImportError: the environment says CTXALLOC_SELECTION="contextvar", but the ContextVar of this NumPy'
        in outcome.err
    )


def test_the_import_leaves_the_selection_and_the_contexts_as_they_were() -> None:
    # The look for NumPy's variable happens in a Context of its own.
    program = """
import contextvars, numpy
import ctxalloc, ctxalloc_example
names = [variable.name for variable in contextvars.copy_context()]
assert "current_allocator" not in names and "ctxalloc_witness" not in names, names
assert ctxalloc.current().name == "default_allocator"
print("ends")
"""
    for way in WAYS:
        assert subprocesses.says(program, CTXALLOC_SELECTION=way) == "ends"
