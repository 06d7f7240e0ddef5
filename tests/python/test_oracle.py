"""CPython and ctxalloc agree on random programs at every step; and what compares them would notice if they did not.

`tests/oracle/README.md` says what the programs are. `make oracle` runs more of them, `make stress` millions.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ORACLE = Path(__file__).resolve().parents[1] / "oracle"
sys.path[:0] = [str(ORACLE), str(ORACLE.parent / "mutants")]

import compare  # noqa: E402
import generate  # noqa: E402
import language  # noqa: E402
import run_oracle  # noqa: E402
import run_rust  # noqa: E402
import selection  # noqa: E402
from mutant import TREE  # noqa: E402


def oracle(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(ORACLE / "run.py"), "--jobs", "2", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def check(done: subprocess.CompletedProcess[str]) -> None:
    print(done.stdout, done.stderr, sep="\n")  # the seed, for pytest to show where it fails
    assert done.returncode == 0
    assert " agree on " in done.stdout
    assert done.stderr == ""


@pytest.mark.once
@pytest.mark.skipif(shutil.which("cargo") is None, reason="the Rust side is built with cargo")
def test_all_sides_name_the_same_handler_at_every_step() -> None:
    # That warnings are errors there too; `make test` runs `make oracle` besides, with many more programs.
    check(oracle("--programs", "100", "--seed", "1", "--seed", "fresh"))


@pytest.mark.long
@pytest.mark.parametrize("way", ["contextvar", "contextvar-methods", "sethandler"])
def test_every_way_to_select_agrees_with_contextvars(way: str) -> None:
    check(oracle("--programs", "250", "--seed", "fresh", "--sides", "contextvars,numpy", CTXALLOC_SELECTION=way))


@pytest.mark.once
def test_the_text_of_a_program_is_the_program() -> None:
    for number in range(200):
        program = compare.generated("text", number)
        assert language.valid(program)
        assert language.parse(language.dump(program)) == program
        assert program == compare.generated("text", number)


@pytest.mark.once
def test_programs_use_every_word() -> None:
    programs = (compare.generated("words", number) for number in range(1500))
    used = {node.word for program in programs for node in language.walk(program)}
    assert used == set(language.WORDS)
    assert used == {"main", *generate.WEIGHTS}


@pytest.mark.once
@pytest.mark.parametrize("mutants", [run_oracle.MUTANTS, run_rust.MUTANTS], ids=["oracle", "rust"])
def test_every_mutant_finds_the_text_that_it_breaks(mutants: tuple[Any, ...]) -> None:
    assert len(mutants) >= 60
    for mutant in mutants:
        assert mutant.applied(TREE) != (TREE / mutant.path).read_text()


class TokensOfAnybody(selection.Bare):
    """Resets in whatever context it is called."""

    name = "wrong"

    def reset(self, token: Any) -> None:
        try:
            super().reset(token)
        except ValueError:
            super().set(self.old(token))


def test_a_wrong_selection_is_found_and_shown_by_a_small_program() -> None:
    with compare.Comparer([selection.Bare(), TokensOfAnybody()], None) as sides:
        found = sides.run("wrong", range(300)).differences[0]
        small = sides.shrink(found)
    words = [node.word for node in language.walk(small.program)]
    assert len(words) <= 5, compare.report(small)
    assert words.count("set") == words.count("reset") == 1
    marked = [line for line in compare.report(small).splitlines() if "*" in line]
    assert any("reset token=" in line for line in marked)


class Raising(selection.Bare):
    name = "raising"

    def set(self, handler: int) -> Any:
        raise TypeError("no program raises this")


@pytest.mark.parametrize("others", [[selection.Bare()], []], ids=["on one side", "on all"])
def test_an_error_that_no_program_raises_is_a_difference(
    others: list[selection.Selection], capsys: pytest.CaptureFixture[str]
) -> None:
    program = language.parse("(main 0 [(set 1 2) (look 0)])")
    with compare.Comparer([*others, Raising()], None) as sides:
        (traces,) = sides.compare([program])
    assert compare.differ(traces)
    assert "no program raises this" in capsys.readouterr().err


def interpreter(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.once
def test_an_interpreter_that_crashes_is_a_difference(tmp_path: Path) -> None:
    crashing = interpreter(tmp_path / "crashing", "read program; exit 1")
    done = oracle("--programs", "3", "--interpreter", crashing, "--no-shrink")
    assert done.returncode == 1
    assert "DIFFERENCE in program 0 of seed 1" in done.stdout
    assert "multi gave no answer: it crashed" in done.stdout
    assert "--seed 1 --program 0" in done.stdout


@pytest.mark.once
def test_an_interpreter_that_hangs_is_named_with_its_program(tmp_path: Path) -> None:
    hanging = interpreter(tmp_path / "hanging", "while read program; do :; done")
    done = oracle("--programs", "3", "--interpreter", hanging, "--hang-seconds", "2")
    assert done.returncode == 3
    assert "HANG" in done.stderr
    assert "Rust, seed 1 from program 0 on, program 0" in done.stderr
