"""Subinterpreters: ctxalloc refuses to work in one, says so, and the main interpreter does not notice."""

import textwrap

import pytest
from subprocesses import says

# CPython's own module has had two names, and two ways to ask for an interpreter with this one's GIL or its own.
PRELUDE = """
import sys
try:
    import _interpreters
    kinds = {"shared": lambda: _interpreters.create("legacy"), "isolated": lambda: _interpreters.create("isolated")}
    run = _interpreters.exec
except ImportError:
    import _xxsubinterpreters as _interpreters
    kinds = {"shared": lambda: _interpreters.create(isolated=False), "isolated": _interpreters.create}
    run = _interpreters.run_string

IMPORT = '''
try:
    import {name}
except ImportError as error:
    print("refused:", error)
else:
    print("imported")
'''

def in_another(kind, name="ctxalloc", times=1):
    for _ in range(times):
        number = kinds[kind]()
        failure = run(number, IMPORT.format(name=name))
        assert failure is None, failure
        _interpreters.destroy(number)

def the_main_one_works():
    import numpy as np, ctxalloc
    heard = []
    assert ctxalloc.set_event_hook(lambda *event: heard.append(event)) is None
    with ctxalloc.use("pool") as handler:
        array = np.empty(1000)
    assert ctxalloc.handler_of(array) is handler
    del array
    ctxalloc.set_event_hook(None)
    assert len(heard) == 2, heard
    try:
        import ctxalloc_example
    except ImportError:
        return
    assert ctxalloc_example.buffers_on_threads(2, 10) == 20
"""


def program(text: str) -> str:
    return PRELUDE + textwrap.dedent(text)


REFUSED = "refused: ctxalloc works in the main interpreter only, and this is a subinterpreter"
kinds = pytest.mark.parametrize("kind", ["shared", "isolated"])


@kinds
def test_the_import_is_refused_with_a_reason_and_the_main_one_works_on(kind: str) -> None:
    lines = says(program(f"the_main_one_works(); in_another({kind!r}, times=3); the_main_one_works()")).splitlines()
    assert len(lines) == 3
    assert all(line.startswith(REFUSED) for line in lines)


@kinds
def test_a_subinterpreter_that_was_first_spoils_nothing(kind: str) -> None:
    lines = says(program(f"in_another({kind!r}, times=2); the_main_one_works()")).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(REFUSED) for line in lines)


@kinds
def test_the_native_module_by_itself_is_refused_too(kind: str) -> None:
    said = says(program(f"in_another({kind!r}, 'ctxalloc._native'); the_main_one_works()"))
    assert said.startswith(REFUSED)


def test_a_subinterpreter_that_is_left_to_the_end_does_not_hang_the_exit() -> None:
    said = says(
        program(
            """
            number = kinds["shared"]()
            run(number, IMPORT.format(name="ctxalloc"))
            the_main_one_works()
            """
        ),
        # From CPython 3.14 on it says so itself, and the warning as an error would be the exit code 120.
        "-Wignore:remaining subinterpreters:RuntimeWarning",
    )
    assert said.startswith(REFUSED)


def test_where_the_package_cannot_ask_rust_refuses() -> None:
    blind = """
import sys
sys.modules["_interpreters"] = sys.modules["_xxsubinterpreters"] = None
"""
    said = says(
        program(f"the_main_one_works(); IMPORT = {blind!r} + IMPORT; in_another('shared'); the_main_one_works()")
    )
    assert said.startswith("refused: ")
