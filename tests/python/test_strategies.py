"""Strategies as Python sees them: constructed, registered, selected, and refused with a reason."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy_c import struct_in
from resident import rss

import ctxalloc
from ctxalloc import Budget
from ctxalloc.strategies import (
    Aligned,
    Arena,
    Budgeted,
    Fallback,
    Faulty,
    Guard,
    HugePages,
    Numa,
    Pool,
    SharedMemory,
    System,
    Tracked,
    Zeroing,
)

SAME = System()


def test_trim_gives_back_what_nobody_uses() -> None:
    handler = ctxalloc.register("test pool to trim", Pool())
    with ctxalloc.use(handler):
        kept = np.full(1000, 7)
        for _ in range(5):
            np.ones(ctxalloc.MiB)
    assert handler.trim() >= 8 * ctxalloc.MiB
    assert (kept == 7).all()
    assert ctxalloc.handler("aligned64").trim() == 0


def test_a_pool_keeps_no_more_warm_than_it_was_told() -> None:
    handler = ctxalloc.register("test pool that keeps little", Pool(warm_bytes=2 * ctxalloc.MiB))
    with ctxalloc.use(handler):
        arrays = [np.ones(ctxalloc.MiB, np.uint8) for _ in range(16)]
        del arrays
    assert handler.trim() <= 3 * ctxalloc.MiB


def test_so_much_of_what_is_scarce_then_the_heap() -> None:
    scarce = Tracked(Budgeted(Pool(), limit_bytes=10_000))
    handler = ctxalloc.register("test scarce", Fallback(scarce, System()))
    with ctxalloc.use(handler):
        arrays = [np.full(4000, number, np.uint8) for number in range(5)]
        assert [block.address for block in handler.live_blocks()] == [array.ctypes.data for array in arrays[:2]]
        arrays[0].resize(9000, refcheck=False)  # moves to the heap, with its contents
        arrays.append(np.full(4000, 5, np.uint8))
    assert [array[0] for array in arrays] == [0, 1, 2, 3, 4, 5]
    assert (arrays[0][:4000] == 0).all()
    found = {block.address for block in handler.live_blocks()}
    assert found == {arrays[1].ctypes.data, arrays[5].ctypes.data}


WRAPPED = {
    "test C, arena": Arena(),
    "test C, budgeted": Budgeted(Pool(), limit_bytes=ctxalloc.GiB),
    "test C, fallback": Fallback(Faulty(Aligned(), every=2), System()),
    "test C, tracked": Tracked(traceback=1),
    "test C, zeroing": Zeroing(Aligned()),
    "test C, pool": Pool(),
    "test C, guard": Guard(),
    "test C, huge pages": HugePages(),
    "test C, shared memory": SharedMemory(),
    "test C, exact": Budgeted(Guard(align=1), limit_bytes=ctxalloc.GiB),
    "test C, guard tracked": Tracked(Guard()),
    "test C, wiped": Zeroing(HugePages()),
    "test C, shared or not": Fallback(Budgeted(SharedMemory(), limit_bytes=300_000), Pool()),
    "test C, all": Tracked(Zeroing(Fallback(Budgeted(Pool(), limit_bytes=10_000), Faulty(System(), every=3)))),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_numpy_gets_wrong_does_no_harm_under(name: str) -> None:
    """Wrong sizes to free, free(NULL, n), realloc(NULL, n), sizes of zero, and freeing where nobody allocated."""
    c = struct_in(ctxalloc.register(name, WRAPPED[name]).capsule).allocator
    c.free(c.ctx, None, 1000)
    blocks: list[tuple[int, int]] = []

    def make_some(round_: int) -> None:
        for size in (0, 1, 100, 5000, 70_000):
            made = (c.malloc(c.ctx, size), c.calloc(c.ctx, size, 3), c.realloc(c.ctx, None, size))
            for block, kept in zip(made, (size, 3 * size, size), strict=True):
                if block is not None:
                    ctypes.memset(block, round_, kept)
                    blocks.append((block, kept))

    for round_ in range(10):
        thread = threading.Thread(target=make_some, args=(round_,))
        thread.start()
        thread.join()
        for number, (block, size) in enumerate(blocks):
            # Too much for anybody: the block is as it was.
            assert c.realloc(c.ctx, block, (1 << 62) + number) is None
            assert ctypes.string_at(block, size) == bytes([round_]) * size
        for wrong, (block, _) in enumerate(blocks):
            c.free(c.ctx, block, wrong * 1000)
        blocks.clear()
    if name.endswith((" tracked", " all")):
        assert ctxalloc.handler(name).live_blocks() == []


def test_handlers_may_share_a_budget() -> None:
    process = Budget(1000, name="process")
    first = ctxalloc.register("test first share", Budgeted(Pool(), budget=process))
    second = ctxalloc.register("test second share", Budgeted(Arena(), budget=Budget(parent=process)))
    with ctxalloc.use(first):
        held = np.empty(700, np.uint8)
    with ctxalloc.use(second):
        other = np.empty(300, np.uint8)
        with pytest.raises(MemoryError):
            np.empty(1, np.uint8)
    assert (process.in_use_bytes, process.refused) == (1000, 1)
    del held, other
    assert process.in_use_bytes == 0


def test_strategies_say_what_they_are() -> None:
    assert repr(Faulty(Aligned(align=128), every=3)) == "Faulty(upstream=Aligned(align=128), every=3)"
    assert repr(Faulty(System(), probability=0.5, seed=7)) == "Faulty(upstream=System, probability=0.5, seed=7)"
    assert repr(Budgeted(System(), limit_bytes=100)) == "Budgeted(upstream=System, limit_bytes=100)"
    assert repr(Arena()).startswith("Arena(")
    assert repr(Fallback(Aligned(), System())) == "Fallback(first=Aligned(align=64), second=System)"
    assert repr(System()) == "System()"
    assert repr(Pool()) == "Pool(source=PrivatePages)"
    assert repr(HugePages()) == "Pool(source=HugePages(reserved=False))"
    assert repr(Numa(node=[0], policy="interleave")) == 'Pool(source=NumaPages(nodes=[0], policy="interleave"))'
    assert repr(SharedMemory()) == "SharedMemory()"
    assert repr(Guard(align=1, underrun=True)) == (
        "Guard(align=1, underrun=True, quarantine_bytes=268435456, report=True)"
    )
    both = Tracked(System(), traceback=10**9, tasks=True)
    assert repr(Zeroing(both)) == "Zeroing(upstream=Tracked(upstream=System, traceback=1000000000, tasks=True))"


@pytest.mark.parametrize(
    ("construct", "error", "message"),
    [
        (lambda: Aligned(align=24), ValueError, "align=24"),
        (lambda: Aligned(align="64"), TypeError, "align='64'"),  # type: ignore[arg-type]
        (lambda: Aligned(align=64.0), TypeError, "align=64.0"),  # type: ignore[arg-type]
        (lambda: Pool(warm_bytes=-1), ValueError, "warm_bytes=-1"),
        (lambda: Pool(decay_seconds=float("nan")), ValueError, "decay_seconds=nan"),
        (lambda: Pool(warm_bytes="many"), TypeError, "warm_bytes='many'"),  # type: ignore[arg-type]
        (lambda: Faulty(System()), TypeError, "either every= or probability="),
        (lambda: Faulty(System(), every=2, probability=0.5), TypeError, "was given both"),
        (lambda: Faulty(System(), every=0), ValueError, "every=0"),
        (lambda: Faulty(System(), probability=1.5), ValueError, "probability=1.5"),
        (lambda: Budgeted(System(), limit_bytes=-1), ValueError, "limit_bytes=-1"),
        (lambda: Budgeted(System()), TypeError, "either limit_bytes= or budget="),
        (lambda: Budgeted(System(), limit_bytes=1, budget=Budget()), TypeError, "was given both"),
        (lambda: Budgeted(System(), budget=5), TypeError, "budget=5"),  # type: ignore[arg-type]
        (lambda: Fallback(SAME, SAME), ValueError, "what it refused it refuses again"),
        (lambda: Fallback(System(), System()), ValueError, "what it refused it refuses again"),
        (lambda: Fallback(SharedMemory(), SharedMemory()), ValueError, "what it refused it refuses again"),
        (lambda: Zeroing(Zeroing(System())), ValueError, "wipes its blocks already"),
        (lambda: Zeroing(Guard()), ValueError, "its memory is gone"),
        (lambda: Tracked(Guard(align=1)), ValueError, "aligned to 8 bytes or more"),
        (lambda: Tracked(traceback=-1), ValueError, "traceback=-1"),
        (lambda: Tracked(tasks="all"), TypeError, "tasks='all'"),  # type: ignore[arg-type]
        (lambda: Fallback(System(), None), TypeError, "needs a strategy"),  # type: ignore[arg-type]
        (lambda: Faulty(System, every=2), TypeError, "upstream"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused_with_the_value(
    construct: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        construct()
    assert message in str(caught.value)


FORKING = """
import ctxalloc, numpy as np, os, threading

stop = threading.Event()
def hammer():
    with ctxalloc.use("pool"):
        while not stop.is_set():
            [np.empty(size) for size in (10, 1000, 50_000, 1_000_000)]
threads = [threading.Thread(target=hammer) for _ in range(4)]
[thread.start() for thread in threads]
kept = []
with ctxalloc.use("pool"):
    for number in range(30):
        kept.append(np.full(70_000, number))
        child = os.fork()
        if child == 0:
            whole = all((array == at).all() for at, array in enumerate(kept))
            again = [np.ones(size) for size in (1, 1000, 100_000, 1_000_000)]
            kept.clear()
            ctxalloc.handler("pool").trim()
            os._exit(0 if whole and all(array.all() for array in again) else 1)
        assert os.waitpid(child, 0)[1] == 0
stop.set()
[thread.join() for thread in threads]
print("forked")
"""


@pytest.mark.once
def test_a_forked_child_goes_on_though_other_threads_were_in_the_pool() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "forked"), done.stderr


def test_blocks_of_ended_threads_are_given_again() -> None:
    handler = ctxalloc.register("test pool of threads", Pool())

    def work() -> None:
        with ctxalloc.use(handler):
            for _ in range(200):
                np.ones(5000)

    def round_of_threads() -> None:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    round_of_threads()
    before = rss()
    for _ in range(20):
        round_of_threads()
    # 160 threads kept 20 blocks of 40 kB each: 128 MB if they were lost with their threads.
    assert rss() - before < 64 * ctxalloc.MiB
