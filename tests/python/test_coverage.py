"""docs/coverage.md, held to the NumPy that is installed: each example in its tables is run under a handler that counts.

The tables are read from the document: a new line there is a new test here.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documents
import numpy as np
import pytest
from numpy_c import ForeignHandler

import ctxalloc

DOCUMENT = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text()


def examples(heading: str, column: int) -> list[str]:
    """The code in one column of the tables under a heading."""
    section = re.split(r"^## ", DOCUMENT.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [code for row in rows for code in re.findall(r"`([^`]*[(\[@+=][^`]*|m\.T)`", row[column])]


LIVES = examples("Lives in the handler", 1)
MOMENT = examples("Asks the handler for a moment", 1)
NEVER = examples("Never asks the handler", 1)
OF_OTHERS = examples("Never asks the handler", 0)


@pytest.fixture
def names() -> dict[str, Any]:
    """The names that the document gives its examples."""
    (block,) = (block for block in documents.blocks(DOCUMENT) if block.language == "python")
    made: dict[str, Any] = {}
    exec(block.text, made)
    return made


@pytest.fixture
def counting(fresh_name: Callable[[], str]) -> Iterator[ForeignHandler]:
    """A handler that counts, selected."""
    handler = ForeignHandler(fresh_name())
    with handler.selected():
        yield handler


def test_the_tables_are_found() -> None:
    assert len(LIVES) >= 20
    assert len(MOMENT) >= 5
    assert len(NEVER) >= 15
    assert len(OF_OTHERS) == 5


@pytest.mark.parametrize("code", LIVES)
def test_lives_in_the_handler(code: str, names: dict[str, Any]) -> None:
    with ctxalloc.use("aligned64") as handler:
        array = eval(code, names)
    assert ctxalloc.handler_of(array) is handler


@pytest.mark.parametrize("code", MOMENT)
def test_asks_the_handler_for_a_moment(code: str, names: dict[str, Any], counting: ForeignHandler) -> None:
    before = set(counting.live)
    exec(code, names)
    assert counting.calls
    assert set(counting.live) == before


@pytest.mark.parametrize("code", NEVER)
def test_never_asks_the_handler(code: str, names: dict[str, Any], counting: ForeignHandler) -> None:
    exec(code, names)
    assert counting.calls == []


@pytest.mark.parametrize("code", OF_OTHERS)
def test_no_handler_owns_memory_of_others(code: str, names: dict[str, Any]) -> None:
    with ctxalloc.use("aligned64"):
        array = eval(code, names)
    assert isinstance(array, np.ndarray)
    assert ctxalloc.handler_of(array) is None


def test_arrays_of_older_pickles_live_in_the_handler_small_or_copied(names: dict[str, Any]) -> None:
    pickle = names["pickle"]
    with ctxalloc.use("aligned64") as handler:
        small = pickle.loads(pickle.dumps(np.ones(10), protocol=4))
        large = np.array(pickle.loads(pickle.dumps(names["a"], protocol=5)))
    assert ctxalloc.handler_of(small) is handler
    assert ctxalloc.handler_of(large) is handler


def test_an_array_of_size_0_has_one_byte(counting: ForeignHandler) -> None:
    empty = np.empty(0)
    assert list(counting.live.values()) == [1]
    del empty
    assert not counting.live


def test_a_resize_asks_the_handler_that_made_the_array(counting: ForeignHandler) -> None:
    array = np.ones(10)
    with ctxalloc.use("aligned64"):
        array.resize(1000)
    assert list(counting.live.values()) == [8000]


def test_an_element_of_a_string_array_has_16_bytes_long_text_is_elsewhere(counting: ForeignHandler) -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("StringDType came with NumPy 2.0")
    texts = np.empty(100, np.dtypes.StringDType())
    assert list(counting.live.values()) == [1600]
    counting.calls.clear()
    texts[:] = ["long " * 20] * 100
    assert counting.calls == []
