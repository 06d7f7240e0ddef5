"""What Python calls where nobody is told of an exception is not broken off.

The collector's callbacks, those of weak references, and what a generator does when it is freed.
"""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]

START = """
    import weakref
    lost, told, counts = [], 0, dict(start=0, stop=0, freed=0, closed=0)
    sys.unraisablehook = lambda one: lost.append((one.err_msg, repr(one.exc_value), repr(one.object)))
    def count(phase, info):
        counts[phase] += 1
    class One:
        pass
    def freed(ref):
        counts["freed"] += 1
    def generator():
        try:
            yield
        finally:
            counts["closed"] += 1
    def collected(number):
        pass
    def referred(number):
        one = One()
        one.ref = weakref.ref(one, freed)
        return one.ref
    def generated(number):
        next(generator())
    def cycle(number):
        one = One()
        one.itself = one
        one.generator = generator()
        next(one.generator)
        return weakref.ref(one, freed)
"""


@pytest.mark.parametrize("make", ["collected", "referred", "generated", "cycle"])
def test_what_is_called_where_nobody_is_told_is_not_broken_off(make: str) -> None:
    """Each of 100 requests meets its limit in a loop that makes such an object each time."""
    check(
        START
        + f"""
    gc.callbacks.append(count)
    gc.set_threshold(5)
    for _ in range(100):
        kept = []
        try:
            with ctxalloc.request(limit_bytes=400 * KiB, whole=True):
                for number in range(1_000_000):
                    kept.append([number, {make}(number)])
                    if number < 0:
                        print(number)
        except ctxalloc.BudgetExceeded:
            told += 1
    gc.disable()
    assert told == 100 and not lost, (told, len(lost), lost[:3])
    assert counts["start"] == counts["stop"] > 100, counts
    """
    )


def test_what_begins_there_is_told() -> None:
    """A request of such a callback's own ends with its error all the same: it is told at its end."""
    check(
        START
        + """
    def freed(ref):
        try:
            with ctxalloc.request(limit_bytes=400 * KiB, whole=True):
                kept = [[number] for number in range(100_000)]
        except ctxalloc.BudgetExceeded:
            counts["freed"] += 1
    for _ in range(10):
        ref = referred(0)
    assert counts["freed"] == 10 and not lost, (counts, lost)
    """
    )
