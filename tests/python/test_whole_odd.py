"""Whole requests in odd shapes: blocks that outlive their request and grow, and blocks that nobody can make."""

import sys

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]


def test_who_lets_a_block_of_an_ended_request_grow_pays():
    """A service's list of all it has seen: the limit of the request that began it is not that of the others."""
    check("""
        kept, text = [], bytearray(5000)
        with ctxalloc.request(whole=True, limit_bytes=4 * MiB) as first:
            kept.extend(range(1000))
            block = libc.malloc(5000)
        with ctxalloc.request(whole=True, limit_bytes=4 * MiB) as other:
            other_text = bytearray(5000)
        live = first.stats.live_bytes
        kept.extend([None] * 3_000_000)  # nobody's now
        assert first.stats.refused == 0 and first.stats.live_bytes < live - 7000, first.stats
        with ctxalloc.request(whole=True) as second:
            other_text.extend(bytes(10 * MiB))
            ctypes.memset(block, 7, 5000)
            block = libc.realloc(block, 6 * MiB)
            assert ctypes.string_at(block, 5000) == bytes([7]) * 5000
        whole = second.stats.whole
        assert 10 * MiB < whole.object_bytes < 12 * MiB and 6 * MiB <= whole.native_bytes < 7 * MiB, whole
        assert other.stats.live_bytes < 100 * KiB > first.stats.live_bytes, (other.stats, first.stats)
        try:
            with ctxalloc.request(whole=True, limit_bytes=12 * MiB) as third:
                block = libc.realloc(block, 8 * MiB)
                third_text = other_text
                other_text.extend(bytes(10 * MiB))
        except ctxalloc.BudgetExceeded as error:
            assert error.limit_bytes == 12 * MiB
        else:
            raise AssertionError(third.stats)
        assert len(other_text) == 10 * MiB + 5000 and not any(other_text)
        assert 8 * MiB <= third.stats.whole.native_bytes < 9 * MiB, third.stats
        libc.free(block)
        del kept, other_text, third_text
        for request in (first, other, second, third):
            assert request.stats.live_bytes < 200 * KiB, request.stats
    """)


def test_a_block_of_a_request_that_has_not_ended_stays_its_own():
    check("""
        with ctxalloc.request(whole=True) as first:
            blocks = [libc.malloc(5000), libc.malloc(5000)]
            with ctxalloc.request(whole=True, root=True) as second:
                blocks[0] = libc.realloc(blocks[0], MiB)
            assert first.stats.whole.native_bytes >= MiB and second.stats.whole.native_bytes < 200 * KiB
        before = first.stats.whole.native_bytes
        with ctxalloc.request(whole=True) as third:
            blocks[0] = libc.realloc(blocks[0], 4000)  # one that shrinks gives back only
            assert before - first.stats.whole.native_bytes == MiB - 4000
        for block in blocks:
            libc.free(block)
        assert third.stats.whole.native_bytes < 200 * KiB
    """)


def test_what_nobody_can_make_is_in_no_number():
    check("""
        def tried(work):
            try:
                work()
            except (MemoryError, OverflowError):
                return
            raise AssertionError("made")
        before = ctxalloc.coverage().nobodys_by_thread
        with ctxalloc.request(whole=True) as request:
            grown, block = bytearray(5000), libc.malloc(5000)
            for size in (1 << 42, 1 << 60, (1 << 63) - 64):
                tried(lambda: bytes(size))
                tried(lambda: [None] * (size // 8))
                tried(lambda: grown.__imul__(size // 4096))
                assert not libc.malloc(size) and not libc.realloc(block, size)
            assert not libc.malloc((1 << 64) - 1)
        assert request.stats.peak_bytes < MiB and request.stats.total_bytes < MiB, request.stats
        assert request.stats.refused == 0, request.stats
        tried(lambda: bytes(1 << 60))
        after = ctxalloc.coverage().nobodys_by_thread
        assert sum(after.values()) - sum((before or {}).values()) < 16 * MiB, after
        budget = ctxalloc.Budget(8 * MiB, name="tenant")
        for limits in ({"limit_bytes": 8 * MiB}, {"budget": budget}):
            for size in (1 << 30, 1 << 42):
                try:
                    with ctxalloc.request(whole=True, **limits) as request:
                        bytes(size)
                except ctxalloc.BudgetExceeded as error:
                    assert error.limit_bytes == 8 * MiB
                else:
                    raise AssertionError("no refusal")
                assert request.stats.peak_bytes < MiB, request.stats
                try:
                    with ctxalloc.request(whole=True, **limits) as request:
                        grown.extend(bytes(MiB))
                        if not libc.realloc(libc.malloc(5000), size):
                            raise MemoryError
                except ctxalloc.BudgetExceeded as error:
                    assert error.limit_bytes == 8 * MiB
                else:
                    raise AssertionError("no refusal")
                assert request.stats.peak_bytes < 4 * MiB, request.stats
                grown = bytearray(5000)
                gc.collect()
    """)


def test_a_block_larger_than_all_memory_is_refused_as_by_malloc():
    """With few of its pages touched such a block could be mapped; then the program would end where it touches them."""
    check("""
        with open("/proc/sys/vm/overcommit_memory") as file:
            if file.read().strip() == "1":
                sys.exit()  # the system was told to give everything
        with open("/proc/meminfo") as file:
            total = {line.split()[0]: int(line.split()[1]) << 10 for line in file if line.startswith(("Mem", "Swap"))}
        size = 2 * (total["MemTotal:"] + total["SwapTotal:"])
        for request in (ctxalloc.request(), ctxalloc.request(whole=True)):
            with request:
                try:
                    bytes(size)
                except MemoryError:
                    continue
            raise AssertionError(request.stats)
    """)


def test_what_cannot_be_placed_is_shown_as_nobodys():
    check("""
        libc.memalign.restype, libc.memalign.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
        with ctxalloc.request(whole=True) as request:
            before = request.stats.whole.nobodys_bytes
            block = libc.memalign(128 * MiB, 3 * MiB)
            assert block % (128 * MiB) == 0
            assert request.stats.whole.nobodys_bytes - before >= 3 * MiB
        libc.free(block)
        assert request.stats.live_bytes < 200 * KiB
    """)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own figures of a process")
def test_blocks_of_a_power_of_two_take_no_more_than_without():
    """With a record before it such a block would be the pool's next larger one: a quarter more memory."""
    check("""
        def anonymous():
            with open("/proc/self/smaps_rollup") as file:
                return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Anonymous:"))
        def filled(size):
            block = libc.malloc(size)
            ctypes.memset(block, 1, size)
            return block
        with ctxalloc.request(whole=True) as request:
            for size in (1 * KiB, 2 * KiB, 4 * KiB, 8 * KiB, 16 * KiB):
                [libc.free(block) for block in [filled(size) for _ in range(64)]]
                gc.collect()
                blocks = [None] * (32 * MiB // size)
                before, charged = anonymous(), request.stats.whole.native_bytes
                for n in range(len(blocks)):
                    blocks[n] = filled(size)
                took = anonymous() - before - sys.getsizeof(blocks[0]) * len(blocks)
                assert 0 <= request.stats.whole.native_bytes - charged - 32 * MiB < 200 * KiB, request.stats
                assert 30 * MiB < took < 1.08 * 32 * MiB, (size, took / MiB)
                [libc.free(block) for block in blocks]
                ctxalloc.trim()
    """)
