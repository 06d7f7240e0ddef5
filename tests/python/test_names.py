"""A test's name is a sentence that is read in lists and reports: short enough for one line of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
TREE = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "examples", "benches")
MAX_LENGTH = 69
PYTHON_TEST = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
RUST_TEST = re.compile(
    r"""
    \#\[(?:tokio::)?test\b[^\]]*\]  # the attribute
    (?:\s|//[^\n]*|\#\[[^\]]*\])*   # comments and other attributes
    (?:async\s+)?fn\s+(\w+)
    """,
    re.VERBOSE,
)


def sources(ending: str) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in (TREE / folder).rglob(f"*{ending}") if "target" not in path.parts)


def python_names() -> dict[str, Path]:
    return {name: path for path in sources(".py") for name in PYTHON_TEST.findall(path.read_text())}


def rust_names() -> dict[str, Path]:
    return {name: path for path in sources(".rs") for name in RUST_TEST.findall(path.read_text())}


def too_long(names: dict[str, Path]) -> list[str]:
    return [f"{path}: {name} ({len(name)})" for name, path in names.items() if len(name) > MAX_LENGTH]


def test_names_of_python_tests_are_under_70_characters() -> None:
    names = python_names()
    assert test_names_of_python_tests_are_under_70_characters.__name__ in names
    assert too_long(names) == []


def test_names_of_rust_tests_are_under_70_characters() -> None:
    names = rust_names()
    assert len(names) > 100
    assert too_long(names) == []


def test_a_name_is_found_behind_attributes_and_comments() -> None:
    text = """
    #[test]
    // why
    #[ignore = "a reason"]
    fn one() {}

    #[tokio::test(start_paused = true)]
    async fn two() {}
    """
    assert RUST_TEST.findall(text) == ["one", "two"]
