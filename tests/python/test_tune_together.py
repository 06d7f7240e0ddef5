"""All advice together: what is good for each route alone, and not for the process, is withdrawn and told."""

import io
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import commands
import pytest
import recordings

from ctxalloc import _recommend, _replay, _together
from ctxalloc._ending import StoppedError
from ctxalloc._replay import FailedError, Measured, Round
from ctxalloc._together import ADVISED, AS_THEY_ARE, Together, Wanted, tried

pytestmark = pytest.mark.once
MiB = 1 << 20
WANTED = [Wanted("b", "hugepages", 2.0, 0.1), Wanted("c", "arena", 1.0, 0.05), Wanted("a", "pool", 3.0, 0.15)]
NOTHING: Any = None
"""In place of a plan: what replays it is not asked."""
THEIRS = {"a": "default", "b": "default", "c": "pool", "d": "pool"}
"""What they were recorded under."""


class Machine:
    """Takes the place of replays: what the process takes, by the routes that are as advised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, str]] = []
        self.stops_at: int | None = None
        monkeypatch.setattr(_together, "measured", self.measured)

    def cpu(self, _routes: Mapping[str, str]) -> float:
        return 1.0

    def peak_bytes(self, _routes: Mapping[str, str]) -> int | None:
        return 100 * MiB

    def measured(
        self,
        _plan: Any,
        arms: Mapping[str, Mapping[str, str]],
        rounds: int,
        *,
        mmap_threshold: int | None,
        shown: Any,
    ) -> Measured:
        if self.stops_at == len(self.asked):
            raise StoppedError
        assert mmap_threshold is None, "nobody recorded page faults"
        theirs = arms[AS_THEY_ARE]
        assert all(set(theirs) == set(routes) for routes in arms.values()), "whatever is not advised is as it was"
        other = {arm: {name: one for name, one in arms[arm].items() if one != theirs[name]} for arm in arms}
        self.asked += [routes for arm, routes in other.items() if arm != AS_THEY_ARE]
        found: Measured = {arm: [] for arm in arms}
        for number in range(rounds):
            for arm, part in found.items():
                shown(arm)
                cpu, peak = self.cpu(other[arm]) * (1 + 0.01 * number), self.peak_bytes(other[arm])
                part.append(Round(cpu, cpu, cpu / 2, 1, peak, peak))
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def answers(wanted: list[Wanted] = WANTED) -> list[Together]:
    return list(tried(NOTHING, wanted, THEIRS, 3, lambda _: None))


def test_what_is_no_worse_together_stays_as_it_is(machine: Machine) -> None:
    first, last = answers()
    assert first == Together({}, {}, ["a", "b", "c"])
    assert (last.withdrawn, last.untried) == ({}, [])
    assert machine.asked == [{"a": "pool", "b": "hugepages", "c": "arena"}], "they are measured once"
    assert [len(part) for part in last.rounds.values()] == [3, 3]


def test_the_advice_that_makes_the_process_larger_is_withdrawn(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (112 if {"a", "b"} <= set(routes) else 100) * MiB)
    last = answers()[-1]
    assert list(last.withdrawn) == ["b"], "of the two, a gains more"
    assert last.withdrawn["b"] == (
        "hugepages saves 10.0% of the time of all requests, but beside the other routes as advised these together then "
        "hold 12 MiB more at the peak (1.12 times as much): it is withdrawn"
    )
    assert machine.asked[-1] == {"a": "pool", "c": "arena"}
    assert [one.peak_bytes for one in last.rounds[ADVISED]] == [100 * MiB] * 3, "of what is advised in the end"


def test_the_advice_that_makes_the_process_slower_is_withdrawn(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu", lambda routes: 1.2 if "c" in routes else 0.9 if routes else 1.0)
    last = answers()[-1]
    assert list(last.withdrawn) == ["c"]
    assert "take 202.0 ms more of processor time (1.20 times as much)" in last.withdrawn["c"]
    # With the last one they are all, which were measured before.
    assert machine.asked == [
        {"a": "pool", "b": "hugepages", "c": "arena"},
        {"a": "pool"},
        {"a": "pool", "b": "hugepages"},
    ]


def test_a_few_mib_cost_no_route_most_of_its_time(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (2 + 7 * bool(routes)) * MiB)
    assert answers()[-1].withdrawn == {}
    # Nor does more, if what it saves is as much.
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (100 + 40 * ("a" in routes)) * MiB)
    dear = [Wanted("a", "pool", 9.0, 0.9), *WANTED[:2]]
    assert answers(dear)[-1].withdrawn == {}
    assert list(answers()[-1].withdrawn) == ["a"], "15 % of the time are not worth 40 % of the memory"


def test_what_one_route_saves_pays_for_no_other(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (100 + 40 * ("a" in routes) + 15 * ("b" in routes)) * MiB)
    last = answers([Wanted("a", "pool", 9.0, 0.9), *WANTED[:2]])[-1]
    assert list(last.withdrawn) == ["b"]
    assert machine.asked[-1] == {"a": "pool", "c": "arena"}


def test_what_routes_share_they_pay_for_together(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (114 if {"a", "b"} & set(routes) else 100) * MiB)
    last = answers()[-1]
    assert last.withdrawn == {}, "neither a (7.5 %) nor b (5 %) would pay alone"
    assert machine.asked[1:] == [
        {"a": "pool", "b": "hugepages"},
        {"a": "pool", "c": "arena"},
        {"b": "hugepages", "c": "arena"},
    ]
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (116 if {"a", "b"} & set(routes) else 100) * MiB)
    assert set(answers()[-1].withdrawn) == {"a", "b"}, "30 % of the time pay for 15 %"


def test_who_adds_memory_to_what_others_pay_for_is_withdrawn(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (100 + 12 * ("c" in routes)) * MiB)
    last = answers()[-1]
    assert list(last.withdrawn) == ["c"]
    assert machine.asked[1:] == [{"a": "pool", "b": "hugepages"}], "which is no worse: nobody else is asked"
    assert [one.peak_bytes for one in last.rounds[ADVISED]] == [100 * MiB] * 3, "of what is advised in the end"


def test_much_slower_by_the_medians_is_slower_though_rounds_overlap(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, usual = itertools.cycle([1.1, 1.2, 1.2]), itertools.cycle([1.0, 1.5, 1.0])
    monkeypatch.setattr(machine, "cpu", lambda routes: next(slow if routes else usual))
    assert set(answers()[-1].withdrawn) == {"a", "b", "c"}


@pytest.mark.parametrize(("cpu", "more"), [(1.015, 0), (1.0, 4), (0.9, 4)])
def test_a_difference_within_the_spread_withdraws_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, cpu: float, more: int
) -> None:
    monkeypatch.setattr(machine, "cpu", lambda routes: cpu if routes else 1.0)
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (100 + more * bool(routes)) * MiB)
    assert answers()[-1].withdrawn == {}


def test_memory_that_no_system_tells_is_no_reason(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "peak_bytes", lambda _: None)
    last = answers()[-1]
    assert last.withdrawn == {}
    told = {name: [one._asdict() for one in part] for name, part in last.rounds.items()}
    assert _together.text_of(told) == (
        "as advised they take 1.00 of the processor time that they take as they are (3 rounds)"
    )


def test_what_an_interrupt_leaves_untried_is_known(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu", lambda routes: 2.0 if "a" in routes else 1.0)
    machine.stops_at = 2
    seen: list[Together] = []
    with pytest.raises(StoppedError):
        seen.extend(tried(NOTHING, WANTED, THEIRS, 3, lambda _: None))
    assert (list(seen[-1].withdrawn), seen[-1].untried) == (["a"], ["b", "c"])


# ---- as the command does it


def recommended(path: Path, *options: str, status: int = 0) -> tuple[dict[str, Any], str]:
    done = commands.ctxalloc("recommend", path, "--json", "--rounds", "3", *options)
    assert done.returncode == status, done
    return json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_routes_that_gain_alone_and_cost_together(tmp_path: Path) -> None:
    """Each route is faster with the pool, and no larger. Together it keeps warm what the others have no use for."""
    path = recordings.in_each_others_way().write(tmp_path / "both.rec")
    told, _ = recommended(path, "--strategy", "pool")
    routes = {one["route"]: one for one in told["routes"]}
    for name, one in routes.items():
        base, pool = (min(part["peak_bytes"] for part in one["rounds"][arm]) for arm in ("default", "pool"))
        assert pool < 1.05 * base + MiB, f"{name}: by itself it is no larger"
    if "unknown" in {one["verdict"] for one in routes.values()}:
        return  # the machine is too noisy to know a gain, which is never wrong
    found = {name: (one["verdict"], one["strategy"], one["withdrawn"]) for name, one in routes.items()}
    assert found["POST /large"] == found["POST /many"] == ("leave", "default", "pool")
    of_memory = {name for name, one in routes.items() if one["withdrawn"] and "more at the peak" in one["reason"]}
    assert of_memory == {"POST /large", "POST /many"}, "what a pool keeps of the small ones is too little to matter"
    assert "MiB more at the peak (1." in routes["POST /large"]["reason"]
    rows = {
        line.split("'")[1]: line for line in told["snippets"]["python"].splitlines() if line.startswith("    'POST")
    }
    assert "strategies.System()" in rows["POST /large"]
    assert ("strategy" in rows["POST /small"]) == (found["POST /small"][0] == "leave")
    assert routes["POST /large"]["would_change"][0].startswith("a process that may hold so much more")
    if rounds := told["together"]["rounds"]:
        peaks = {arm: [one["peak_bytes"] for one in part] for arm, part in rounds.items()}
        assert min(peaks["advised"]) <= 1.05 * max(peaks[AS_THEY_ARE]) + 8 * MiB


@pytest.mark.long
def test_one_route_alone_is_not_replayed_again(tmp_path: Path) -> None:
    told, _ = recommended(recordings.all_die_at_once().write(tmp_path / "one.rec"), "--strategy", "pool")
    assert told["together"] is None
    assert told["routes"][0]["withdrawn"] is None


def test_the_page_and_the_text_say_what_was_withdrawn(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recordings.in_each_others_way().write(tmp_path / "both.rec")
    monkeypatch.setattr(machine, "peak_bytes", lambda routes: (100 + 20 * len(routes)) * MiB)
    monkeypatch.setattr(_recommend, "_measure", _better)
    output = tmp_path / "advice.html"
    assert advised(path, output) == 0
    text = capsys.readouterr().out
    for said in (text, output.read_text()):
        assert said.count("it is withdrawn") == 3
        assert "nothing that is advised for one route is good for all together" in said
    machine.stops_at = len(machine.asked)
    assert advised(path, output) == 130
    assert "interrupted before all routes were replayed together" in capsys.readouterr().out


def _better(*_: Any, into: Any, **__: Any) -> None:
    for name, cpu in (("default", 1.0), ("pool", 0.5)):
        into[name] += [Round(cpu, cpu, cpu / 2, 1000, 100 * MiB, 0)] * 3


def advised(path: Path, output: Path) -> int:
    return _recommend.recommend(path, ["pool"], 3, only=None, is_json=False, output=output, out=sys.stdout)


def test_a_replay_that_fails_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Measured:
        raise FailedError("the strategy has no memory")

    monkeypatch.setattr(_together, "measured", fails)
    with pytest.raises(FailedError, match="no memory"):
        answers()


def test_what_cannot_be_replayed_keeps_nothing_warm(tmp_path: Path) -> None:
    made = recordings.Script()
    for name, size in (("GET /a", 2 << 20), ("GET /broken", 1 << 40)):
        for _ in range(30):
            request = made.begin(name)
            made.free(made.make(request, size))
            made.end(request)
    path = made.write(tmp_path / "a.rec", handler="pool")
    done = commands.ctxalloc("recommend", path, "--rounds", "1", "--strategy", "default", "--json")
    assert json.loads(done.stdout)["warm_bytes"] == 3 * MiB


def test_progress_is_told_without_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [100.0], io.StringIO()
    monkeypatch.setattr(_replay.time, "monotonic", lambda: now[0])
    shown = _replay.progress_on(out)
    for second in range(25):
        now[0] = 100.0 + second
        shown(f"round {second}")
        shown("")
    assert out.getvalue() == "ctxalloc: round 10\nctxalloc: round 20\n"
