"""How much memory ``ctxalloc recommend`` advises to keep warm."""

import json
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
import recordings

from ctxalloc import MiB, _warm
from ctxalloc._replay import Round

pytestmark = [pytest.mark.once, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

ARMS = {"4 MiB warm": 4 * MiB, "16 MiB warm": 16 * MiB, "64 MiB warm": 64 * MiB}


def rounds(*cpu: float, faults: int = 100) -> list[Round]:
    return [Round(one, one, one / 2, faults, 0, 0) for one in cpu]


def chosen(least: list[Round], quarter: list[Round], full: list[Round]) -> tuple[int, str]:
    """For requests that take ten seconds: a hundredth of that is what less may cost."""
    found = _warm.chosen(ARMS, dict(zip(ARMS, (least, quarter, full), strict=True)), 10.0)
    assert found.most == 64 * MiB
    return found.size // MiB, found.reason


def test_the_least_is_kept_that_costs_next_to_nothing() -> None:
    full = rounds(1.0, 1.1, 1.2)
    assert chosen(rounds(1.05, 1.15, 1.25), rounds(9, 9, 9), full) == (
        4,
        "with 64 MiB warm they save 0.5% of the requests' time, which is not worth that memory",
    )
    assert chosen(rounds(0.9, 0.9, 0.9), full, full) == (4, "with 64 MiB warm they save no time")
    assert chosen(rounds(1.2, 1.3, 1.4), rounds(1.0, 1.1, 1.2), full)[0] == 16
    assert chosen(rounds(2, 2, 2), rounds(1.2, 1.3, 1.4), full) == (
        64,
        "with 16 MiB warm they take 2.0% of the requests' time more",
    )


@pytest.mark.parametrize(
    ("less", "full"),
    [
        (rounds(1.0, 1.3, 1.4), rounds(1.0, 1.1, 1.2)),  # by medians
        (rounds(1.3, 1.3, 1.3), rounds(1.0, 1.3, 1.6)),  # by the fastest
        (rounds(1, 1, 1, faults=1_000_000), rounds(1, 1, 1)),  # page faults, which noise does not touch
        (rounds(1, 1), rounds(1, 1, 1)),  # too few
    ],
)
def test_whatever_says_that_less_costs_more_is_heard(less: list[Round], full: list[Round]) -> None:
    assert chosen(less, less, full)[0] == 64


def advice(script: recordings.Script, path: Path) -> Any:
    script.write(path, handler="pool")
    done = commands.ctxalloc("recommend", path, "--rounds", "3", "--strategy", "pool", "--json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def test_what_was_needed_once_is_not_kept(tmp_path: Path) -> None:
    # Each request takes so long that what a busy machine does to a replay is little of it.
    script = recordings.Script(step_ns=1_000_000_000)
    for number in range(20):
        request = script.begin("GET /table")
        script.free(script.make(request, (96 if number == 0 else 1) * MiB))
        script.end(request)
    told = advice(script, tmp_path / "once.rec")
    assert (told["warm_bytes"], told["warm"]["most_bytes"]) == (7 * MiB, 116 * MiB)
    assert told["routes"][0]["warm_bytes"] == 7 * MiB
    assert "warm_bytes=7340032" in told["snippets"]["python"]
    assert {len(part) for part in told["warm"]["rounds"].values()} == {3}


def test_what_is_needed_again_and_again_is_kept(tmp_path: Path) -> None:
    script = recordings.Script()
    for _ in range(10):
        request = script.begin("GET /table")
        blocks = [script.make(request, 3 * MiB) for _ in range(4)]
        for block in blocks:
            script.free(block)
        script.end(request)
    told = advice(script, tmp_path / "again.rec")
    assert told["warm_bytes"] == told["warm"]["most_bytes"] == 15 * MiB
    assert "of the requests' time more" in told["warm"]["reason"]


def test_who_interrupts_has_what_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_warm, "tried", interrupted)
    script = recordings.Script()
    for _ in range(30):
        request = script.begin("GET /table")
        script.free(script.make(request, 24 * MiB))
        script.end(request)
    path = script.write(tmp_path / "interrupted.rec", handler="pool")
    done = commands.ctxalloc("recommend", path, "--rounds", "3", "--strategy", "pool", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["is_partial"], told["warm"], told["warm_bytes"]) == (130, True, None, 29 * MiB)
    assert len(told["routes"][0]["rounds"]["pool"]) == 3
