"""The rules of ``ctxalloc recommend``: what is decided of numbers that are given here, without a replay."""

from collections.abc import Sequence
from typing import Any

import pytest

from ctxalloc import _advice, _advice_text, _sizes
from ctxalloc._advice import Decision, decide, needs_no_replay, would_change
from ctxalloc._replay import Measured, Round
from ctxalloc._sizes import sizes_of

pytestmark = pytest.mark.once
MiB = 1 << 20


def route(**changes: Any) -> dict[str, Any]:
    """A hundred requests of 10 ms each."""
    return {
        "name": "GET /",
        "requests": 100,
        "refused_requests": 0,
        "refused_by": {},
        "refused_by_budgets": 0,
        "peak_bytes": [5 * MiB] * 100,
        "duration_ns": 10**9,
        "blocks": 1000,
        "total_bytes": 1000 * MiB,
        "peak_live_bytes": 5 * MiB,
        "escaped_blocks": 0,
        "gaps_ns": [],
        **changes,
    }


def rounds(cpu: Sequence[float], faults: int = 1000, peak: int | None = 100 * MiB) -> list[Round]:
    """Rounds of so many seconds each, half of them in each half."""
    return [Round(one, one, one / 2, faults, peak, peak) for one in cpu]


def decided(measured: Measured, **changes: Any) -> Decision:
    return decide(route(**changes), measured)


SLOW, FAST = (1.0, 1.02, 1.05), (0.5, 0.52, 0.55)


def test_a_strategy_is_advised_that_is_faster_in_every_round() -> None:
    found = decided({"default": rounds(SLOW), "pool": rounds(FAST, faults=10)})
    assert (found.verdict, found.strategy) == ("change", "pool")
    assert found.gain is not None
    assert (found.gain.share, found.gain.faults) == (pytest.approx(0.5 / 1.02), 9.9)
    assert "us of processor time less for a request" in found.reason


def test_rounds_that_overlap_are_no_gain() -> None:
    found = decided({"default": rounds((1.0, 1.0, 1.6)), "pool": rounds((0.5, 0.5, 1.1), faults=10)})
    assert (found.verdict, found.strategy) == ("unknown", "default")
    # Page faults promise it, whatever the medians say.
    noisy = decided({"default": rounds((1.0, 1.0, 1.6), faults=100_000), "pool": rounds((0.9, 1.1, 1.2), faults=10)})
    assert (noisy.verdict, noisy.strategy) == ("unknown", "default")
    assert "page faults, but rounds differ by as much; measure" in noisy.reason
    alike = decided({"default": rounds((1.0, 1.01, 1.02)), "pool": rounds((0.97, 0.98, 1.01))})
    assert (alike.verdict, alike.strategy) == ("leave", "default")


def test_one_half_of_the_recording_is_not_enough() -> None:
    half = [Round(one, one, 0.1, 1000, 100 * MiB, 0) for one in FAST]
    # In its second half the default takes 0.2 of the second, and the other one 0.4.
    base = [Round(one, one, one - 0.2, 1000, 100 * MiB, 0) for one in SLOW]
    assert decided({"default": base, "pool": half}).verdict != "change"
    # Page faults promise it. Each round is faster than each of the default's, so the spread is not why.
    fewer = [one._replace(faults=10) for one in half]
    found = decided({"default": base, "pool": fewer})
    assert (found.verdict, found.gain is not None and found.gain.low_seconds > 0) == ("unknown", True)
    assert "page faults, but it does not save 2% in both halves of the recording; measure" in found.reason


def test_page_faults_that_promise_more_than_the_rounds_saved_say_so() -> None:
    slow, fast = rounds((1.0, 1.0, 1.0), faults=1_000_000), rounds((0.99, 0.99, 0.99), faults=10)
    found = decided({"default": slow, "pool": fast})
    assert found.verdict == "unknown"
    assert "page faults, but in these rounds it saves less than 2%; measure" in found.reason


def test_what_a_strategy_takes_once_is_no_gain_of_the_others() -> None:
    """A pool's first pages, in a short recording: the second half knows better."""
    base = [Round(one, one, one / 2 + 0.2, 1000, 100 * MiB, 0) for one in (1.0, 1.01, 1.02)]
    other = [Round(one, one, one / 2 + 0.0025, 900, 100 * MiB, 0) for one in (0.795, 0.8, 0.805)]
    found = decided({"default": base, "pool": other})
    assert found.verdict != "change", found


def test_a_gain_that_is_nothing_beside_the_request_leaves_it_as_it_is() -> None:
    found = decided({"default": rounds(SLOW), "pool": rounds(FAST)}, duration_ns=10**11)
    assert (found.verdict, found.strategy) == ("leave", "default")
    assert found.gain is not None
    assert found.gain.share < 0.01


def test_much_more_memory_is_not_advised_however_fast_it_is() -> None:
    found = decided({"default": rounds(SLOW), "hugepages": rounds(FAST, peak=200 * MiB)})
    assert found.verdict == "leave"
    assert "hugepages would save" in found.reason
    assert "100 MiB more at the peak" in found.reason


def test_where_all_others_are_slower_that_is_said() -> None:
    found = decided({"default": rounds(FAST), "pool": rounds(SLOW)})
    assert found.reason == "no strategy takes less processor time than the one that it was recorded under, default"


def test_what_it_saves_may_pay_for_more_memory() -> None:
    few = decided({"default": rounds(SLOW, peak=2 * MiB), "pool": rounds(FAST, peak=9 * MiB)})
    assert (few.verdict, few.strategy) == ("change", "pool"), "a few MiB are nothing"
    fast = [one / 20 for one in FAST]
    assert decided({"default": rounds(SLOW), "pool": rounds(fast, peak=145 * MiB)}).verdict == "change"
    assert decided({"default": rounds(SLOW), "pool": rounds(FAST, peak=145 * MiB)}).verdict == "leave"


def test_the_advice_begins_with_what_was_recorded() -> None:
    """Whoever has the pool already is not told to go back, and not told that it gains what it has."""
    measured = {"default": rounds(SLOW), "pool": rounds(FAST), "hugepages": rounds(FAST)}
    found = decided(measured, handlers={"pool": 100})
    assert (found.verdict, found.strategy) == ("leave", "pool")
    better = decided({**measured, "hugepages": rounds([one / 2 for one in FAST])}, handlers={"pool": 100})
    assert (better.verdict, better.strategy) == ("change", "hugepages")
    assert better.gain is not None
    assert better.gain.cpu_seconds == pytest.approx(0.0026), "against the pool"
    assert "than pool, which it was recorded under" in better.reason
    assert decided({"pool": rounds(FAST)}, handlers={"pool": 100}).reason == (
        "there is nothing to compare it with: it was recorded under pool; name others with --strategy"
    )
    backwards = decided({"default": rounds(FAST), "pool": rounds(SLOW)}, handlers={"pool": 100})
    assert (backwards.verdict, backwards.strategy) == ("change", "default")
    assert needs_no_replay(route(requests=1, handlers={"pool": 1})) == (
        "unknown",
        "pool",
        "1 request says too little; record at least 20",
        None,
    )


def test_what_a_route_was_recorded_under() -> None:
    def of(**handlers: int) -> tuple[str, str, bool]:
        return tuple(_advice.as_it_is(route(handlers=handlers)))

    assert of(System=3) == ("default", "System", True)
    assert of(pool=3) == ("pool", "pool", True)
    assert of(pool=3, Arena=4) == ("arena", "Arena", False)
    assert of(**{"Aligned 128": 1}) == ("aligned128", "Aligned 128", True)
    # One of the program's own, which may have other options; and one that no replay has.
    assert of(**{"Pool over HugePages": 1}) == ("hugepages", "Pool over HugePages", False)
    assert of(Callbacks=1) == ("default", "Callbacks", False)
    told = _advice.confidence_of(route(handlers={"Callbacks": 1}), {})
    assert "recorded under Callbacks, replayed as default" in told


def test_what_no_replay_has_is_left_as_it_is() -> None:
    """`Zeroing` erases keys: a pool that takes less time is none."""
    left = _advice.needs_no_replay(route(handlers={"Zeroing": 100}))
    assert left is not None
    assert (left.verdict, left.gain) == ("leave", None)
    assert "recorded under Zeroing, which no replay has" in left.reason


def test_advice_for_less_memory_says_nothing_of_times() -> None:
    for share in (-0.1, 0.0, 0.01):
        decision = _advice.Decision("change", "default", "", _advice.Gain("default", 0, 0, 0, share, 0, 10 * MiB))
        assert not any("times as long" in one for one in _advice.would_change(route(), decision))


def test_less_memory_is_a_reason_if_it_is_not_slower() -> None:
    smaller = decided({"default": rounds(SLOW), "arena": rounds(SLOW, peak=60 * MiB)})
    assert (smaller.verdict, smaller.strategy) == ("change", "arena")
    assert "40 MiB less at the peak" in smaller.reason
    assert decided({"default": rounds(SLOW), "arena": rounds((1.2, 1.3, 1.4), peak=60 * MiB)}).verdict == "leave"


def test_the_simplest_of_those_that_are_as_good_is_advised() -> None:
    alike = {"default": rounds(SLOW), "arena": rounds(FAST), "hugepages": rounds(FAST), "pool": rounds((0.51, 0.54))}
    assert decided({**alike, "pool": rounds((0.51, 0.54, 0.56))}).strategy == "pool"
    assert decided({**alike, "pool": rounds((0.8, 0.8, 0.8))}).strategy == "hugepages"


def test_what_is_not_known_of_memory_is_no_reason() -> None:
    found = decided({"default": rounds(SLOW, peak=None), "pool": rounds(FAST, peak=None)})
    assert (found.verdict, found.gain and found.gain.peak_bytes) == ("change", None)


def test_a_budget_that_refused_is_told() -> None:
    leave = Decision("leave", "pool", "why", None)
    told = would_change(route(refused_by_budgets=12), leave)
    assert [text for text in told if "a budget (a tenant's, or the process's), which refused 12 times" in text]
    assert not [text for text in would_change(route(), leave) if "budget" in text]


def test_requests_without_a_name_are_to_get_some() -> None:
    leave = Decision("leave", "pool", "why", None)
    assert [text for text in would_change(route(name=""), leave) if text.startswith("names for these requests")]
    assert not [text for text in would_change(route(), leave) if "names" in text]


def test_few_requests_or_rounds_say_nothing() -> None:
    early = needs_no_replay(route(requests=19))
    assert early is not None
    assert (early.verdict, early.reason) == ("unknown", "19 requests say too little; record at least 20")
    assert decided({"default": rounds((1.0, 1.0)), "pool": rounds(FAST)}).verdict == "unknown"
    assert decided({"default": rounds(SLOW), "pool": rounds((0.5, 0.5))}).verdict == "unknown"


def test_what_cannot_gain_is_not_replayed() -> None:
    small = needs_no_replay(route(blocks=200, total_bytes=10_000, peak_live_bytes=1000))
    assert small is not None
    assert (small.verdict, small.strategy) == ("leave", "default")
    assert needs_no_replay(route()) is None


def test_sizes_are_quantiles_with_room() -> None:
    sizes = sizes_of(route(peak_bytes=[*range(1, 1001)], gaps_ns=[10**9] * 99 + [3600 * 10**9]))
    assert (sizes.limit_bytes, sizes.reserve_bytes) == (64 << 10, 64 << 10)
    large = sizes_of(route(peak_bytes=[one * MiB for one in range(1, 1001)]))
    assert (large.limit_bytes, large.reserve_bytes) == (int(998.5 * 1.5 * MiB + 0.5 * 1.5 * MiB), 1140 * MiB)
    assert sizes_of(route(peak_bytes=[1] * 19)).limit_bytes is None


@pytest.mark.parametrize(
    ("gaps", "seconds"), [([], 10), ([0.1] * 5, 10), ([4.0] * 9, 48), ([0.2] * 50 + [300] * 9, 10), ([300, 400], 1)]
)
def test_memory_is_kept_over_short_gaps_and_not_over_long_ones(gaps: list[float], seconds: float) -> None:
    assert sizes_of(route(gaps_ns=[int(gap * 1e9) for gap in gaps])).decay_seconds == seconds


def test_halves_that_differ_are_told() -> None:
    changed = route(peak_bytes=[MiB] * 50 + [9 * MiB] * 50)
    assert _sizes.halves_differ(changed) == 9
    assert "the two halves of the recording differ" in _advice.confidence_of(changed, {})
    assert "the two halves agree" in _advice.confidence_of(route(), {})
    unsure = decide(changed, {"default": rounds(SLOW), "pool": rounds(FAST)})
    assert unsure.verdict == "unknown"
    # Page faults, which noise does not touch, say it too.
    assert decide(changed, {"default": rounds(SLOW), "pool": rounds(FAST, faults=5)}).verdict == "change"


def test_no_number_is_a_negative_zero() -> None:
    gain = _advice.Gain("pool", -1e-9, -2e-9, -1e-9, -0.0001, -0.04, -3.0)
    text = _advice_text.gain_text(gain._asdict())
    assert text == (
        "pool saves 0.0 us of CPU a request (0.0 to 0.0), 0.0% of its time; 0.0 page faults a request; "
        "-3 B of RSS at the peak"
    )
