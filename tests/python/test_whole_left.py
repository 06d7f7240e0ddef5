"""What ended whole requests leave behind: no more than somebody has."""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]


def test_empty_requests_leave_nothing():
    check("""
        budget = ctxalloc.Budget(4 * MiB, name="small")
        for n in range(30_000):
            with ctxalloc.request(whole=True, root=True, budget=budget):
                pass
        assert budget.in_use_bytes < 200 * KiB and len(ctxalloc.metrics.present()) < 10, budget
    """)


def test_names_that_cpython_keeps_of_ended_requests_fill_no_budget():
    """Its cache of attributes keeps each name that was looked up."""
    check("""
        budget, subject = ctxalloc.Budget(4 * MiB, name="small"), object()
        for n in range(1_500):
            with ctxalloc.request(whole=True, root=True, budget=budget):
                for kind in range(200):
                    getattr(subject, "visit_" + str(kind), None)
        assert budget.in_use_bytes < 200 * KiB and len(ctxalloc.metrics.present()) < 10, budget
    """)


def test_names_that_cpython_keeps_are_samples_no_longer_than_others():
    """They lay where no other name did, so nothing took their place: 6 MiB of names that had gone."""
    check("""
        subject = object()
        for limit in None, 512 * KiB:
            with ctxalloc.request(whole=True, limit_bytes=limit) as request:
                for kind in range(100_000):
                    getattr(subject, "visit_" + str(kind), None)
                assert request.stats.whole.object_bytes < 300 * KiB, request.stats
            assert request.stats.peak_bytes < 500 * KiB, request.stats
    """)


@pytest.mark.parametrize("collects", [False, True], ids=["at once", "by the collector"])
def test_an_asynchronous_block_is_left_when_nothing_is_left_of_its_memory(*, collects: bool) -> None:
    """A finalizer had used the reserve up, and what `__aexit__` returns was refused: the request stayed selected."""
    check(
        """
    kept = []
    class Fills:
        def __del__(self):
            for number in range(400_000):
                kept.append(str(number))
    async def one():
        try:
            async with ctxalloc.request(whole=True, limit_bytes=2 * MiB):
                filler = Fills()
                filler.itself = filler if COLLECTS else None
                del filler
                gc.collect() if COLLECTS else None
        except MemoryError:
            pass
        kept.clear()
        return ctxalloc.current_request(), ctxalloc.current().name
    sys.unraisablehook = lambda error: None
    for _ in range(20):
        assert asyncio.run(one()) == (None, "default_allocator")
    """.replace("COLLECTS", str(collects))
    )
