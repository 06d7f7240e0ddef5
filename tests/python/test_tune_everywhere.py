"""The pool for all routes of a service: where it is better than what is advised for each, and only there."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import recordings
from test_tune_together import Machine, MiB, _better

from ctxalloc import _advice, _recommend, _replay, _together
from ctxalloc._advice import Decision
from ctxalloc._ending import StoppedError
from ctxalloc._replay import FailedError, Measured

pytestmark = pytest.mark.once
ROUTES = ("POST /many", "POST /large", "POST /small")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(_recommend, "_measure", _better)
    return Machine(monkeypatch)


@pytest.fixture
def told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """What is recommended where the pool is better, of these routes, by themselves too; and the process takes this."""
    known = _advice.decide

    def ask(
        *good_alone: str,
        cpu: Callable[[dict[str, str]], float] = machine.cpu,
        peak_bytes: Callable[[dict[str, str]], int | None] = machine.peak_bytes,
        script: recordings.Script | None = None,
        status: int = 0,
        only: str | None = None,
    ) -> dict[str, Any]:
        def decide(route: dict[str, Any], measured: Any) -> Decision:
            if route["name"] in good_alone:
                return known(route, measured)
            return Decision("leave", "default", "alone it gains nothing", None)

        monkeypatch.setattr(_advice, "decide", decide)
        monkeypatch.setattr(machine, "cpu", cpu)
        monkeypatch.setattr(machine, "peak_bytes", peak_bytes)
        path = (script or recordings.in_each_others_way()).write(tmp_path / "service.rec")
        with (tmp_path / "told.json").open("w") as out:
            done = _recommend.recommend(path, ["pool"], 3, only=only, is_json=True, output=None, out=out)
        assert done == status
        capsys.readouterr()
        found: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
        return found

    return ask


def verdicts(told: dict[str, Any]) -> dict[str, str]:
    return {one["route"]: one["verdict"] for one in told["routes"]}


def cost(all_three: float, otherwise: float = 1.0) -> Callable[[dict[str, str]], float]:
    return lambda routes: all_three if len(routes) == len(ROUTES) else otherwise


def test_what_only_all_routes_together_gain_is_advised(machine: Machine, told: Callable[..., dict[str, Any]]) -> None:
    found = told(cpu=cost(0.4), peak_bytes=lambda routes: (100 - 30 * (len(routes) == len(ROUTES))) * MiB)
    assert machine.asked == [dict.fromkeys(ROUTES, "pool")], "all at once, and nothing else"
    assert verdicts(found) == dict.fromkeys(ROUTES, "change")
    for one in found["routes"]:
        assert one["strategy"] == "pool"
        assert one["reason"] == (
            "with pool for all of them all routes together take 0.40 of the processor time and 0.70 of the RSS at the "
            "peak that they take as they are"
        )
    assert "System" not in found["snippets"]["python"]
    assert found["warm_bytes"] is not None
    advised = found["together"]["rounds"]["advised"]
    assert [one["peak_bytes"] for one in advised] == [70 * MiB] * 3


def test_it_takes_the_place_of_what_is_advised_for_each(machine: Machine, told: Callable[..., dict[str, Any]]) -> None:
    found = told("POST /many", cpu=lambda routes: {0: 1.0, 1: 0.9}.get(len(routes), 0.5))
    assert verdicts(found) == dict.fromkeys(ROUTES, "change")
    reasons = {one["route"]: one["reason"] for one in found["routes"]}
    assert "less for a request" in reasons["POST /many"], "its own reason is the better one"
    assert reasons["POST /large"].endswith("1.00 of the RSS at the peak that they take as advised for each")
    assert found["together"]["rounds"]["advised"][0]["cpu"] == 0.5


@pytest.mark.long
def test_what_it_adds_to_the_advice_must_be_worth_it(machine: Machine, told: Callable[..., dict[str, Any]]) -> None:
    found = told("POST /many", cpu=lambda routes: 0.5 if routes else 1.0)
    assert verdicts(found) == {"POST /many": "change", "POST /large": "leave", "POST /small": "leave"}
    assert found["together"]["rounds"]["advised"][0]["cpu"] == 0.5


@pytest.mark.parametrize("more_mib", [40, 400])
def test_it_is_not_advised_for_more_memory_than_it_pays_for(
    told: Callable[..., dict[str, Any]],
    more_mib: int,
) -> None:
    found = told(cpu=cost(0.97), peak_bytes=lambda routes: (100 + more_mib * bool(routes)) * MiB)
    assert verdicts(found) == dict.fromkeys(ROUTES, "leave")
    assert found["together"] is None


def test_a_route_of_which_too_little_is_known_stays_as_it_is(
    machine: Machine, told: Callable[..., dict[str, Any]]
) -> None:
    script = recordings.in_each_others_way()
    request = script.begin("GET /rare")
    script.free(script.make(request, MiB))
    script.end(request)
    found = told(cpu=lambda routes: 0.5 if routes else 1.0, script=script)
    assert verdicts(found) == {**dict.fromkeys(ROUTES, "change"), "GET /rare": "unknown"}
    assert machine.asked == [dict.fromkeys(ROUTES, "pool")]


def test_one_route_that_is_asked_for_is_advised_by_itself(
    machine: Machine, told: Callable[..., dict[str, Any]]
) -> None:
    assert verdicts(told(only="POST /many")) == {"POST /many": "leave"}
    assert machine.asked == []


@pytest.mark.long
@pytest.mark.parametrize("error", [StoppedError(), FailedError("no memory")])
def test_what_ends_it_leaves_the_advice_of_before(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    told: Callable[..., dict[str, Any]],
    error: Exception,
) -> None:
    status = 130 if isinstance(error, StoppedError) else 0

    def ends(plan: Any, arms: Mapping[str, Mapping[str, str]], rounds: int, **options: Any) -> Measured:
        if _together.EVERYWHERE in arms:
            raise error
        return machine.measured(plan, arms, rounds, **options)

    monkeypatch.setattr(_together, "measured", ends)
    found = told("POST /many", status=status)
    assert verdicts(found) == {"POST /many": "change", "POST /large": "leave", "POST /small": "leave"}
    assert found["is_partial"] == (status != 0)
    assert (found["together"]["untried"] == []) == (status == 0)


def test_what_all_routes_replay_is_planned_once(
    monkeypatch: pytest.MonkeyPatch, told: Callable[..., dict[str, Any]]
) -> None:
    """For what they take together, and for how much to keep warm."""
    asked: list[str | None] = []

    def counted(*given: Any, route: str | None = None, **options: Any) -> Any:
        asked.append(route)
        return _replay.planned(*given, route=route, **options)

    monkeypatch.setattr(_recommend, "planned", counted)
    found = told(*ROUTES)
    assert found["together"]["rounds"]
    assert found["warm"]["rounds"]
    assert sorted(asked, key=str) == sorted([None, *ROUTES], key=str)
