"""What a request promises, in the shapes that services have: each of these was broken once, and is a test since."""

import asyncio
import contextlib
import contextvars
import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import subprocesses

import ctxalloc
from ctxalloc import Budget, BudgetExceeded, MiB, current_request, request


def test_a_connection_that_stays_open_costs_no_limit() -> None:
    """An idle connection's timer holds a copy of the Context that some request ran in."""
    contexts = []
    for _ in range(6000):
        with request():
            contexts.append(contextvars.copy_context())
    with pytest.raises(BudgetExceeded), request(limit_bytes=100_000) as scope:
        np.ones(1_000_000)
    assert scope.stats.refused == 1
    before = ctxalloc.request_metrics().present
    contexts.clear()
    gc.collect()
    assert ctxalloc.request_metrics().present == before - 6000


def test_the_second_request_of_a_connection_is_not_charged_to_the_first() -> None:
    """The second request of a connection: uvicorn begins it in a Context copied from the first one."""
    first_tenant, second_tenant = Budget(16 * MiB, name="first"), Budget(512 * MiB, name="second")

    async def serve(tenant: Budget, size: int) -> None:
        async with request(budget=tenant, root=True):
            np.ones(size)

    async def connection() -> None:
        async with request(budget=first_tenant, root=True):
            np.ones(1000)
            second = asyncio.create_task(serve(second_tenant, 4_000_000))
            await second

    asyncio.run(connection())
    assert first_tenant.peak_bytes < MiB
    assert 32_000_000 <= second_tenant.peak_bytes < 33_000_000


def test_a_limit_may_be_changed_and_holds_from_the_next_array_on() -> None:
    tenant = Budget(name="tenant")
    with request(budget=tenant):
        first = np.empty(MiB, np.uint8)
        tenant.limit_bytes = MiB
        assert tenant.limit_bytes == MiB
        with pytest.raises(MemoryError):
            np.empty(10_000, np.uint8)
        tenant.limit_bytes = None
        np.empty(MiB, np.uint8)
        del first
    with pytest.raises(ValueError, match="18446744073709551616"):
        tenant.limit_bytes = 2**64
    with pytest.raises(TypeError, match="limit_bytes=True"):
        request(limit_bytes=True)


def test_a_job_that_starts_its_successor_runs_in_flat_memory() -> None:
    printed = subprocesses.says(
        """
import asyncio, os, time, ctxalloc, numpy as np
from resident import rss

async def job(left, done, times):
    async with ctxalloc.request():
        if left:
            following = asyncio.get_running_loop().create_task(job(left - 1, done, times))
            await asyncio.sleep(0)
            begun = time.thread_time()  # of the processor: others' work on this machine is not in it
            for _ in range(5): np.empty(1000)
            times.append(time.thread_time() - begun)
        else:
            done.set_result(None)

async def main(turns):
    done, times = asyncio.get_running_loop().create_future(), []
    task = asyncio.create_task(job(turns, done, times))
    await done
    return times

asyncio.run(main(2000))
before = rss()
times = asyncio.run(main(50_000))
assert rss() - before < 16 << 20, (rss() - before) >> 20
early, late = sorted(times[:5000])[2500], sorted(times[-5000:])[2500]
assert late < 5 * early, (early, late)
print("flat", ctxalloc.request_metrics().present)
"""
    )
    assert printed == "flat 0"


@pytest.mark.parametrize("after_end", ["charge", "refuse", "detach"])
def test_work_after_the_end_is_treated_as_was_said(after_end: str) -> None:
    tenant = Budget(MiB, name="tenant")
    with request(budget=tenant, name="over", after_end=after_end) as scope:  # type: ignore[arg-type]
        context = contextvars.copy_context()
    if after_end == "refuse":
        with pytest.raises(MemoryError):
            context.run(np.empty, 100_000)
        assert scope.stats.refused == 1
        return
    late = context.run(np.zeros, 10_000)
    owner = ctxalloc.handler_of(late)
    assert owner is not None
    assert owner.name == "over"
    assert context.run(ctxalloc.current).name == "over"
    assert tenant.in_use_bytes == (80_000 if after_end == "charge" else 0)
    if after_end == "charge":
        with pytest.raises(MemoryError):
            context.run(np.empty, 2 * MiB)
    else:
        assert context.run(np.ones, 2 * MiB).sum() == 2 * MiB
    del late
    assert tenant.in_use_bytes == 0


def test_an_array_that_grows_after_the_end_stays_charged() -> None:
    """With "detach" one byte more took it off the tenant's budget, where nothing limits it."""
    for after_end in "charge", "refuse", "detach":
        tenant = Budget(1_000_000)
        with request(budget=tenant, after_end=after_end) as scope:  # type: ignore[arg-type]
            array = np.ones(100_000, "u1")
        grows = contextlib.nullcontext() if after_end != "refuse" else pytest.raises(MemoryError)
        with grows:
            array.resize(100_001, refcheck=False)
        assert tenant.in_use_bytes == scope.stats.live_bytes == array.nbytes
        with pytest.raises(MemoryError):
            array.resize(1_000_001, refcheck=False)
        assert tenant.in_use_bytes == array.nbytes
        array.resize(50_000, refcheck=False)
        assert tenant.in_use_bytes == 50_000
        del array
        assert tenant.in_use_bytes == 0


def test_after_end_is_one_of_three_words() -> None:
    with pytest.raises(ValueError, match="after_end=\"never\"\\): give 'charge', 'refuse' or 'detach'"):
        request(after_end="never")  # type: ignore[arg-type]


def test_the_request_is_known_from_any_depth() -> None:
    def deep() -> ctxalloc.Request | None:
        return current_request()

    async def main() -> None:
        async with request(name="known") as scope:
            found = await asyncio.create_task(asyncio.to_thread(deep))
            assert found == scope
            assert found is not None
            assert {found: 1}[scope] == 1
            array = np.ones(1000)
            assert (found.name, found.stats.live_bytes, found.budget) == ("known", array.nbytes, scope.budget)
            with request() as inner:
                assert current_request() == inner != scope
            with ctxalloc.use("pool"):
                assert current_request() is None
            with pytest.raises(RuntimeError, match="another Request began it"):
                found.__enter__()
        assert found == scope
        assert current_request() is None

    asyncio.run(main())
    assert current_request() is None


def test_a_tiny_array_may_use_the_overdraft_where_numpy_would_crash() -> None:
    printed = subprocesses.says(
        """
import ctxalloc, numpy as np
with ctxalloc.request(limit_bytes=0) as scope:
    assert np.float64(1)[()] == 1
    kept = np.ones(100)
    assert scope.stats.overdraft_bytes == 800, scope.stats
    try: np.ones(1000)
    except MemoryError: print("refused", end=" ")
    kept = [kept]
    try:
        while True: kept.append(np.ones(100))
    except MemoryError: print(scope.stats.overdraft_bytes <= 65536)
with ctxalloc.request(limit_bytes=0, strict=True):
    try: np.empty(1)
    except MemoryError: print("strict")
"""
    )
    assert printed.split() == ["refused", "True", "strict"]


@pytest.mark.once
def test_memory_stays_flat_over_a_cache_of_escapes() -> None:
    printed = subprocesses.says(
        """
import collections, os, time, ctxalloc, numpy as np
from resident import rss

cache = collections.deque(maxlen=20_000)
def requests(count):
    begun = time.thread_time()  # of the processor: others' work on this machine is not in it
    for _ in range(count):
        with ctxalloc.request():
            scratch = np.ones(2000)
            cache.append(np.ones(10))
            del scratch
    return (time.thread_time() - begun) / count
requests(60_000)
before, early = rss(), requests(20_000)
late = requests(100_000)
assert rss() - before < 8 << 20, (rss() - before) >> 20
assert late < 3 * early, (early, late)
assert ctxalloc.request_metrics().present == 20_000
print("flat")
"""
    )
    assert printed == "flat"


def test_limits_hold_and_numbers_are_exact_over_what_c_code_leaks() -> None:
    """f2py leaks an array for each refused argument; `PyDataMem_SetHandler` a capsule for each wrong name."""
    printed = subprocesses.says(
        """
import ctypes, ctxalloc, numpy as np
from ctxalloc import Budget, BudgetExceeded, MiB, request

def leak(thing):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

tenant = Budget(name="tenant")
for number in range(10_000):
    with request(budget=tenant) as scope:
        leak(np.empty(8))  # 64 bytes
        leak(scope.handler.capsule)
        scratch = np.empty(100)
        del scratch
    assert (scope.stats.live_bytes, scope.stats.total_bytes) == (64, 864), scope.stats
    assert tenant.in_use_bytes == 64 * (number + 1)

metrics = ctxalloc.request_metrics()
assert (metrics.begun, metrics.present) == (10_000, 10_000), metrics
for after in range(100):
    with request(budget=tenant, limit_bytes=1000, name="late") as scope:
        kept = np.empty(125)
        assert ctxalloc.handler_of(kept) == scope.handler
        try: np.empty(MiB)
        except MemoryError: pass
        else: raise AssertionError("a limit was passed")
        assert (scope.stats.live_bytes, scope.stats.peak_bytes, scope.stats.refused) == (1000, 1000, 1), scope.stats
        del kept
    assert (scope.stats.live_bytes, scope.escaped.count) == (0, 0)
assert tenant.in_use_bytes == 640_000
tenant.limit_bytes = 641_000
try:
    with request(budget=tenant): np.ones(10_000)
except BudgetExceeded: print("exact, and in force")
"""
    )
    assert printed == "exact, and in force"


def test_budgets_requests_and_handlers_take_weak_references() -> None:
    budget = Budget()
    with request() as scope:
        pass
    for thing in (budget, scope, ctxalloc.handler("pool")):
        assert weakref.ref(thing)() is thing
    assert copy.copy(ctxalloc.handler("pool")) is ctxalloc.handler("pool")


def test_numbers_pickle_and_copy() -> None:
    with request() as scope:
        kept = np.ones(10)
    for thing in (scope.stats, scope.escaped):
        for twin in (pickle.loads(pickle.dumps(thing)), copy.copy(thing), copy.deepcopy(thing)):
            assert repr(twin) == repr(thing)
    del kept


LOWERED = """
t = ctxalloc.Budget(10 * ctxalloc.MiB)
with ctxalloc.request(budget=t):
    a = np.ones(1_000_000)
    t.limit_bytes = ctxalloc.MiB
    np.float64(1)[()]
"""
REFUSED = """
with ctxalloc.request(after_end="refuse"):
    context = contextvars.copy_context()
context.run(lambda: np.float64(1)[()])
"""
USED_UP = """
t = ctxalloc.Budget(ctxalloc.MiB)
cache = []
with ctxalloc.request(budget=t, root=True):
    try:
        while True: cache.append(np.zeros(1024, "u1"))
    except MemoryError: pass
with ctxalloc.request(budget=t, root=True):
    np.float64(1)[()]
"""
SMALL_ONES = """
with ctxalloc.request(limit_bytes=ctxalloc.MiB) as scope:
    rows = []
    try:
        while True: rows.append(np.zeros(64))
    except MemoryError:
        assert scope.stats.overdraft_bytes == 65536, scope.stats
        np.float64(1)[()]
"""
SMALL_ONES_LOWERED = """
t = ctxalloc.Budget(10 * ctxalloc.MiB)
with ctxalloc.request(budget=t):
    rows = [np.empty(1024, "u1") for _ in range(1000)]
    t.limit_bytes = 1000
    np.float64(1)[()]
"""
SMALL_ONES_BESIDE = """
t = ctxalloc.Budget(ctxalloc.MiB)
with ctxalloc.request(budget=t, root=True):
    rows = [np.zeros(100) for _ in range(100)]
    context = contextvars.copy_context()
with ctxalloc.request(budget=t, root=True):
    full = np.empty(t.limit_bytes - t.in_use_bytes, "u1")
    more = [np.zeros(100) for _ in range(10)]
context.run(lambda: np.float64(1)[()])
"""
PROGRAMS = {
    "lowered": LOWERED,
    "refused": REFUSED,
    "used up by a neighbour": USED_UP,
    "small arrays up to the limit": SMALL_ONES,
    "lowered under small arrays": SMALL_ONES_LOWERED,
    "small arrays beside a greedy neighbour": SMALL_ONES_BESIDE,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_no_limit_turns_into_a_crash_of_numpys(program: str) -> None:
    assert subprocesses.says(f"import contextvars, ctxalloc, numpy as np\n{program}\nprint('alive')") == "alive"


def test_flags_and_limits_say_what_is_wanted() -> None:
    for option in ("root", "strict"):
        with pytest.raises(TypeError, match=rf"request\({option}=1\): give True or False"):
            request(**{option: 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an int from 0 to 18446744073709551614"):
        Budget(2**64 - 1)
    with pytest.raises(ValueError, match="a str that UTF-8 can hold"):
        request(name="\ud800")
    with pytest.raises(ValueError, match="after_end"):
        request(after_end="\ud800")  # type: ignore[arg-type]
