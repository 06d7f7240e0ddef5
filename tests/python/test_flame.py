"""Profiles by stack: folded stacks, pprof, read by a decoder of the test's own, and the page with the flame graph."""

import contextlib
import gzip
import io
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxalloc import _command, _flame, _profile

pytestmark = pytest.mark.any_numpy

PROGRAM = """
import numpy as np

def small(size):
    return np.empty(size, np.uint8)

def large():
    kept = [small(1000), np.empty(50_000, np.uint8)]
    return kept

small(10)
kept = large()
kept.pop(0)
"""


def fields(message: bytes) -> dict[int, list[Any]]:
    """A protobuf message: numbers and bytes by the number of their field."""
    found: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        content: Any = number()
        if key & 7 == 2:
            content, at = message[at : at + content], at + content
        else:
            assert key & 7 == 0
        found.setdefault(key >> 3, []).append(content)
    assert at == len(message)
    return found


def packed(message: bytes) -> list[int]:
    found, value, shift = [], 0, 0
    for byte in message:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(value)
            value = shift = 0
    assert shift == 0
    return found


def decoded(content: bytes) -> tuple[list[str], dict[tuple[str, ...], list[int]]]:
    """The kinds of samples, and the values of each stack, the innermost call first."""
    profile = fields(gzip.decompress(content))
    texts = [text.decode() for text in profile[6]]
    assert texts[0] == ""
    assert len(set(texts)) == len(texts)
    functions = {}
    for one in map(fields, profile.get(5, [])):
        functions[one[1][0]] = (texts[one[2][0]], texts[one.get(4, [0])[0]])
    locations = {}
    for one in map(fields, profile.get(4, [])):
        (line,) = map(fields, one[4])
        name, file = functions[line[1][0]]
        locations[one[1][0]] = f"{name} ({file}:{line.get(2, [0])[0]})"
    samples: dict[tuple[str, ...], list[int]] = {}
    for one in map(fields, profile.get(2, [])):
        stack = tuple(locations[number] for number in packed(one[1][0]))
        before = samples.get(stack, [0, 0, 0, 0])
        samples[stack] = [old + new for old, new in zip(before, packed(one[2][0]), strict=True)]
    kinds = [texts[fields(one)[1][0]] for one in profile[1]]
    assert texts[profile[14][0]] in kinds
    return kinds, samples


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_pprof_has_each_stack_with_its_numbers(program: Path, tmp_path: Path) -> None:
    report(tmp_path / "out.pb.gz", program)
    kinds, samples = decoded((tmp_path / "out.pb.gz").read_bytes())
    assert kinds == ["alloc_objects", "alloc_space", "inuse_space", "peak_space"]
    top = "<module> (program.py:{})"
    assert samples["small (program.py:5)", top.format(11)] == [1, 10, 0, 0]
    assert samples["small (program.py:5)", "large (program.py:8)", top.format(12)] == [1, 1000, 0, 1000]
    assert samples["large (program.py:8)", top.format(12)] == [1, 50_000, 50_000, 50_000]


def test_folded_stacks_are_what_was_alive_at_the_peak(program: Path, tmp_path: Path) -> None:
    report(tmp_path / "out.folded", program)
    assert (tmp_path / "out.folded").read_text().splitlines() == [
        "<module> (program.py:12);large (program.py:8) 50000",
        "<module> (program.py:12);large (program.py:8);small (program.py:5) 1000",
    ]


def report(path: Path, program: Path) -> None:
    """Runs the program for a report."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "ctxalloc", "run", f"--report={path}", str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Page(HTMLParser):
    """The labels of a page, and all that it would run or ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.labels: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        self.addresses += [name for name in given if name in ("src", "href") or name.startswith("on")]
        if tag == "button":
            self.labels.append(given["title"] or "")


def test_the_page_draws_each_call_once_and_asks_nobody(program: Path, tmp_path: Path) -> None:
    report(tmp_path / "flame.html", program)
    page = Page((tmp_path / "flame.html").read_text())
    assert page.addresses == []
    assert [label.partition(":")[0] for label in page.labels if "small" in label] == [
        "small (program.py",
    ] * 2
    assert "large (program.py:8): 49.8 KiB, 100.0%" in page.labels
    assert {"script", "img", "b"} & page.tags == {"script"}


def test_names_are_text_wherever_they_are_written() -> None:
    names: dict[str, Any] = {"np": np}
    evil = "</button><b onclick='x'>;\n\"&{title}"
    exec(compile("def f(size): return np.empty(size, np.uint8)", f"/{evil}.py", "exec"), names)
    with _profile.profiled(_flame.FRAMES) as profile:
        names["f"](100_000)
    page = Page(_flame.page(profile, f"<script>{evil}"))
    assert "b" not in page.tags
    assert page.addresses == []
    assert any(evil in label for label in page.labels)
    lines = _flame.folded(profile).splitlines()
    assert all(line.rpartition(" ")[2].isdecimal() for line in lines)
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == profile.all.peak_bytes
    assert any(evil in name for stack in decoded(_flame.pprof(profile))[1] for name in stack)


def test_an_empty_profile_can_be_written() -> None:
    profile = _profile.Profile()
    assert "nothing" in _flame.page(profile, "empty")
    assert _flame.folded(profile) == ""
    assert decoded(_flame.pprof(profile))[1] == {}


def test_a_deep_stack_keeps_its_innermost_calls() -> None:
    def down(levels: int) -> Any:
        return down(levels - 1) if levels else np.empty(1000, np.uint8)

    with _profile.profiled(_flame.FRAMES) as profile:
        down(200)
    (frames,) = [frames for frames, sums in profile.stacks if sums.total_bytes == 1000]
    assert len(frames) == _flame.FRAMES
    assert _flame.page(profile, "deep").count("down") == 2 * 2 * _flame.FRAMES


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--report=out.svg"], ".html, .folded or .pb.gz"),
        (["--report=out.html", "--output", "x"], "--output does not go with --report=FILE"),
        (["--report=out.html", "--sites", "3"], "--sites does not go with --report=FILE"),
        (["--report=nowhere/out.html"], "--report=nowhere/out.html: no file can be written there"),
    ],
)
def test_options_that_contradict_are_errors(options: list[str], says: str, program: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert _command.main(["run", *options, str(program)]) == 2
    assert says in said.getvalue()
