"""What tells a whole request of its limit is raised where its handlers are: not at jumps that CPython leaves out."""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]

LOOPS = {
    # Since 3.13 the jump where the condition is false has no entry in the table of handlers.
    "if": """
        def work(log):
            with ctxalloc.request(limit_bytes=400 * KiB, whole=True):
                try:
                    kept = []
                    for number in range(1_000_000):
                        kept.append([number])
                        if number < 0:
                            print(number)
                finally:
                    log.append(ctxalloc.current_request())
    """,
    # Before, the handler is looked up in front of the loop.
    "while": """
        def one_more(kept):
            kept.append([1])
        def work(log):
            with ctxalloc.request(limit_bytes=400 * KiB, whole=True):
                kept = []
                for _ in range(3):
                    try:
                        while True: one_more(kept)
                    except MemoryError:
                        log.append(True)
    """,
    "async for": """
        async def numbers():
            for number in range(1_000_000):
                yield number
        async def works(log):
            async with ctxalloc.request(limit_bytes=400 * KiB, whole=True):
                kept = []
                try:
                    async for number in numbers():
                        kept.append([number])
                        if number < 0:
                            await asyncio.sleep(0)
                finally:
                    log.append(True)
        def work(log):
            asyncio.run(works(log))
    """,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_no_handler_of_a_loop_is_left_out(loop):
    check(
        LOOPS[loop]
        + """
        for _ in range(60):
            log, told = [], False
            try:
                work(log)
            except MemoryError:
                told = True
            assert log and (told or len(log) == 3), (log, told)
            assert ctxalloc.current_request() is None
    """
    )


def test_outside_of_a_block_the_request_is_told_as_soon():
    """A function with a block of its own, and a loop that is in none: the limit of who called it is told there."""
    check("""
        def greedy(kept):
            try:
                kept.append(1)
            finally:
                kept.append(2)
            for number in range(1_000_000):
                kept.append([number])
                if number < 0:
                    print(number)
        for _ in range(20):
            try:
                with ctxalloc.request(limit_bytes=400 * KiB, whole=True) as request:
                    greedy([])
            except ctxalloc.BudgetExceeded:
                pass
            else:
                raise AssertionError("not told")
            assert request.stats.peak_bytes < 2 * MiB, request.stats
    """)


def test_a_loop_of_which_each_jump_is_left_out_is_told_as_soon():
    """Since 3.13 one that ends with an `if` makes pending calls nowhere else, and used all of its reserve."""
    check(
        LOOPS["if"]
        + """
        peaks = []
        for _ in range(60):
            log = []
            try:
                work(log)
            except ctxalloc.BudgetExceeded:
                peaks.append(log[0].stats.peak_bytes)
        assert len(peaks) == 60
        assert sorted(peaks)[30] < (400 + 64) * KiB, peaks  # of a reserve of 256 KiB
    """
    )
