"""What a profile says of sites, against a naive one: random programs are the judge."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ctxalloc import _profile

pytestmark = pytest.mark.any_numpy
SITES = 6


def site(number: int) -> Callable[[int], Any]:
    """A function that makes arrays, with a name and a file of its own."""
    names: dict[str, Any] = {"np": np}
    code = compile(f"def site{number}(size): return np.empty(size, np.uint8)", f"/nowhere/site{number}.py", "exec")
    exec(code, names)
    function: Callable[[int], Any] = names[f"site{number}"]
    return function


def by_site(profile: _profile.Profile) -> dict[str, tuple[int, int]]:
    """What each had at the peak, and at the end."""
    found = ((where.rpartition(" ")[2], sums) for where, _, sums in profile.sites)
    return {name: (sums.at_peak_bytes, sums.live_bytes) for name, sums in found if name.startswith("site")}


@pytest.mark.parametrize("seed", range(20))
def test_a_profile_agrees_with_a_naive_one(seed: int) -> None:
    chance = random.Random(seed)
    sites = [site(number) for number in range(SITES)]
    live: list[tuple[int, Any]] = []
    sums, peak, at_peak = [0] * SITES, 0, [0] * SITES
    made = set()
    with _profile.profiled() as profile:
        for _ in range(2000):
            choice = chance.random()
            if live and choice < 0.45:
                number, array = live.pop(chance.randrange(len(live)))
                sums[number] -= array.nbytes
                del array
            elif live and choice < 0.6:
                number, array = chance.choice(live)
                size = chance.randrange(1, 5000)
                sums[number] += size - array.nbytes
                array.resize(size, refcheck=False)
                del array
            else:
                number, size = chance.randrange(SITES), chance.randrange(1, 5000)
                live.append((number, sites[number](size)))
                sums[number] += size
                made.add(number)
            if sum(sums) > peak:
                peak, at_peak = sum(sums), list(sums)
    assert by_site(profile) == {f"site{number}": (at_peak[number], sums[number]) for number in made}
    assert profile.all.peak_bytes == peak


def test_it_runs_from_when_it_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it, and then allocates, is in it."""
    begin = _profile._native._profile_begin
    said: list[bool] = []

    def noted(frames: int) -> None:
        said.append(_profile.is_running())
        begin(frames)

    monkeypatch.setattr(_profile._native, "_profile_begin", noted)
    with _profile.profiled():
        said.append(_profile.is_running())
    said.append(_profile.is_running())
    assert said == [False, True, False]
