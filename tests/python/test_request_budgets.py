"""Limits: `limit_bytes`, `ctxalloc.Budget`, and which MemoryError becomes a BudgetExceeded."""

import asyncio
import copy
import pickle

import numpy as np
import pytest

import ctxalloc
from ctxalloc import Budget, BudgetExceeded, request
from ctxalloc._tasks import named


def numbers(error: BudgetExceeded) -> tuple[str, int, int, int]:
    return error.budget, error.limit_bytes, error.in_use_bytes, error.requested_bytes


def test_a_refusal_is_a_memory_error_inside_and_names_its_limit_outside() -> None:
    with pytest.raises(BudgetExceeded) as raised, request(limit_bytes=1000, name="small", strict=True) as scope:  # noqa: PT012
        kept = np.empty(600, np.uint8)
        with pytest.raises(MemoryError) as inside:
            np.empty(401, np.uint8)
        assert not isinstance(inside.value, BudgetExceeded)
        raise inside.value
    error = raised.value
    assert numbers(error) == ("small", 1000, 600, 401)
    assert error.__cause__ is inside.value
    assert isinstance(error, MemoryError)
    assert str(error) == (
        "budget 'small' has no room for 401 more bytes: 600 of its 1000 are in use; "
        "free something, or give it a higher limit"
    )
    assert scope.stats.refused == 1
    assert kept.size == 600


def test_the_error_pickles_and_copies() -> None:
    error = BudgetExceeded("tenant", 1000, 600, 401)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is BudgetExceeded
        assert numbers(other) == numbers(error)
        assert str(other) == str(error)


def test_the_error_of_a_task_pickles_with_its_name() -> None:
    error = ctxalloc.TaskBudgetExceeded("sum", 10, 5, 8, ("sum-abc", 1, 2), "sum")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), other.args, vars(other)) == (ctxalloc.TaskBudgetExceeded, error.args, vars(error))
        assert str(other) == f"task ('sum-abc', 1, 2): {BudgetExceeded('sum', 10, 5, 8)}"


def test_a_refusal_with_a_tasks_name_still_says_whether_it_could_ever_fit() -> None:
    with pytest.raises(BudgetExceeded) as raised, request(limit_bytes=1000, strict=True):  # noqa: PT012
        kept = np.empty(900, np.uint8)
        np.empty(200, np.uint8)
    assert kept.size == 900
    error = named(raised.value, "sum-abc", "sum")
    assert (error.held_bytes, error.of_request, error.never_fits) == (900, True, True)
    other = pickle.loads(pickle.dumps(error))
    assert (other.held_bytes, other.of_request, other.never_fits, other.budget_id) == (900, True, True, None)


def test_async_too() -> None:
    async def main() -> None:
        async with request(limit_bytes=1000, strict=True):
            await asyncio.sleep(0)
            np.ones(1000)

    with pytest.raises(BudgetExceeded, match="has no room for 8000 more bytes: 0 of its 1000"):
        asyncio.run(main())


def test_exactly_the_limit_fits() -> None:
    with request(limit_bytes=1000, strict=True):
        for _ in range(3):
            array = np.empty(1000, np.uint8)
            del array
    with pytest.raises(BudgetExceeded), request(limit_bytes=0, strict=True):
        np.empty(0)
    with request(limit_bytes=(1 << 64) - 2, strict=True):
        np.empty(1000)


def test_growing_an_array_is_refused_and_leaves_it_as_it_was() -> None:
    with pytest.raises(BudgetExceeded) as raised, request(limit_bytes=1000, strict=True):  # noqa: PT012
        array = np.arange(100, dtype=np.uint8)
        array.resize(1001, refcheck=False)
    assert raised.value.in_use_bytes == 100
    assert array.tolist() == list(range(100))


def test_a_memory_error_that_is_none_of_ours_passes() -> None:
    own = MemoryError("mine")
    with pytest.raises(MemoryError) as raised, request(limit_bytes=1000, strict=True):
        raise own
    assert raised.value is own


def test_a_refusal_that_was_handled_does_not_explain_a_later_error() -> None:
    own = MemoryError("mine")
    with pytest.raises(MemoryError) as raised, request(limit_bytes=1000, strict=True):  # noqa: PT012
        with pytest.raises(MemoryError):
            np.empty(5000, np.uint8)
        raise own
    assert raised.value is own

    with pytest.raises(MemoryError, match=r"^$") as raised, request(limit_bytes=1000, strict=True):  # noqa: PT012
        with pytest.raises(MemoryError):
            np.empty(5000, np.uint8)
        np.empty(10)  # it went on
        [0] * (1 << 60)  # CPython's own refusal, which says nothing of itself
    assert type(raised.value) is MemoryError

    with pytest.raises(MemoryError) as raised, request(limit_bytes=1 << 20, strict=True):  # noqa: PT012
        with pytest.raises(MemoryError):
            np.empty(5 << 20, np.uint8)
        with ctxalloc.use(None):
            np.empty(1 << 59, np.uint8)  # the system's own refusal
    assert type(raised.value) is not BudgetExceeded


def test_an_error_without_a_message_counts_if_it_follows_a_refusal() -> None:
    with pytest.raises(BudgetExceeded), request(limit_bytes=1000, strict=True):  # noqa: PT012
        with pytest.raises(MemoryError):
            np.empty(5000, np.uint8)
        raise MemoryError

    with pytest.raises(MemoryError) as raised, request(limit_bytes=1000, strict=True):  # noqa: PT012
        with pytest.raises(MemoryError):
            np.empty(5000, np.uint8)
        np.empty(10)  # it went on
        raise MemoryError
    assert type(raised.value) is MemoryError

    # NumPy's own words, where an array that it fills cannot grow.
    with pytest.raises(BudgetExceeded), request(limit_bytes=1000, strict=True):
        np.fromiter(iter(range(1000)), np.float64)


def test_a_smaller_refusal_in_the_cleanup_does_not_hide_the_first() -> None:
    def work() -> None:
        kept = np.empty(900, np.uint8)
        try:
            np.empty(5000, np.uint8)
        finally:
            with pytest.raises(MemoryError):
                np.empty(200, np.uint8)
            np.empty(50, np.uint8)
            del kept

    with pytest.raises(BudgetExceeded) as raised, request(limit_bytes=1000, name="r", strict=True):
        work()
    assert numbers(raised.value) == ("r", 1000, 900, 5000)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), request(limit_bytes=10, strict=True):  # noqa: PT012
        try:
            np.empty(100)
        except MemoryError as refused:
            raise ZeroDivisionError from refused


def test_the_innermost_refused_request_tells_and_others_let_it_through() -> None:
    with pytest.raises(BudgetExceeded) as raised, request(limit_bytes=1000, name="outer", strict=True) as outer:  # noqa: PT012
        kept = np.empty(700, np.uint8)
        with request(limit_bytes=5000, name="inner", strict=True) as inner:
            np.empty(400, np.uint8)
    assert numbers(raised.value) == ("outer", 1000, 700, 400)
    assert type(raised.value.__cause__) is not BudgetExceeded
    assert (inner.stats.refused, outer.stats.refused) == (0, 1)
    assert inner.stats.live_bytes == 0
    del kept
    assert outer.stats.live_bytes == 0


def test_a_refusal_of_the_outer_one_passes_through_an_inner_one_untouched() -> None:
    with pytest.raises(BudgetExceeded) as raised, request(limit_bytes=1000, name="outer", strict=True) as outer:  # noqa: PT012
        handler = outer.handler
        with pytest.raises(MemoryError) as inside, request(name="inner"), ctxalloc.use(handler):
            np.empty(5000, np.uint8)
        assert not isinstance(inside.value, BudgetExceeded)
        raise inside.value
    assert numbers(raised.value) == ("outer", 1000, 0, 5000)


def test_budgets_are_a_tree() -> None:
    process = Budget(10_000, name="process")
    tenants = [Budget(4000, parent=process, name=f"tenant {n}") for n in range(3)]
    held = []
    for tenant in tenants:
        with request(budget=tenant, strict=True) as scope:
            assert scope.budget.parent == tenant
            held.append(np.empty(3000, np.uint8))
    assert [tenant.in_use_bytes for tenant in tenants] == [3000] * 3
    assert process.in_use_bytes == process.peak_bytes == 9000
    with pytest.raises(BudgetExceeded) as raised, request(budget=tenants[0], limit_bytes=10, strict=True):
        np.empty(11, np.uint8)
    assert raised.value.limit_bytes == 10
    with pytest.raises(BudgetExceeded) as raised, request(budget=tenants[0], strict=True):
        np.empty(1001, np.uint8)
    assert numbers(raised.value) == ("tenant 0", 4000, 3000, 1001)
    extra = Budget(parent=process)
    with pytest.raises(BudgetExceeded) as raised, request(budget=extra, strict=True):
        np.empty(1001, np.uint8)
    assert numbers(raised.value) == ("process", 10_000, 9000, 1001)
    assert (process.refused, [tenant.refused for tenant in tenants]) == (1, [1, 0, 0])
    held.clear()
    assert process.in_use_bytes == extra.in_use_bytes == sum(tenant.in_use_bytes for tenant in tenants) == 0
    assert process.peak_bytes == 9000


def test_a_budget_is_idle_when_nothing_can_charge_it() -> None:
    budget = Budget(1 << 20)
    assert budget.is_idle
    below = Budget(parent=budget)
    assert not budget.is_idle
    del below
    terms = request(budget=budget)
    assert not budget.is_idle, "a request could begin"
    with terms:
        assert (budget.in_use_bytes, budget.is_idle) == (0, False)
        escaped = np.ones(1000)
    del terms
    assert not budget.is_idle, "a block has escaped"
    del escaped
    assert budget.is_idle
    with request(budget=budget, reserve_bytes=1000):
        assert not budget.is_idle
    assert budget.is_idle


def test_tenants_come_and_go_and_none_gets_its_limit_twice() -> None:
    """The recipe of docs/services.md, with one place: a request that has no array yet keeps its tenant's."""
    seen: dict[str, Budget] = {}
    others = Budget(100, name="others")

    def budget_of(name: str) -> Budget:
        if name not in seen and seen:
            idle = next((name for name, budget in seen.items() if budget.is_idle), None)
            if idle is None:
                return others
            del seen[idle]
        return seen.setdefault(name, Budget(1_000_000, name=name))

    with request(budget=budget_of("red")):
        with request(budget=budget_of("blue"), root=True):
            assert list(seen) == ["red"]
        held = np.ones(100_000)
        with request(budget=budget_of("red"), root=True), pytest.raises(MemoryError):
            np.ones(100_000)
    assert budget_of("blue").name == "others"
    del held
    assert budget_of("blue").name == "blue"


def test_a_budget_says_what_it_is() -> None:
    process = Budget(name="process")
    tenant = Budget(1000, parent=process)
    assert (process.limit_bytes, process.parent, process.name) == (None, None, "process")
    assert (tenant.limit_bytes, tenant.parent, tenant.name) == (1000, process, "unnamed")
    assert tenant != process
    assert tenant != Budget(1000, parent=process)
    assert len({process, tenant.parent, tenant}) == 2
    assert repr(process) == '<ctxalloc.Budget "process": 0 bytes in use, no limit>'
    assert repr(tenant) == '<ctxalloc.Budget "unnamed": 0 of 1000 bytes in use>'


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"limit_bytes": -1}, ValueError, r"Budget\(limit_bytes=-1\): give a number of bytes"),
        ({"limit_bytes": "1"}, TypeError, r"Budget\(limit_bytes='1'\)"),
        ({"parent": 5}, TypeError, r"Budget\(parent=5\): give a ctxalloc.Budget"),
        ({"name": b"x"}, TypeError, r"Budget\(name=b'x'\): give a str"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Budget(**options)  # type: ignore[arg-type]
