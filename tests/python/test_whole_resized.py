"""Small blocks that are resized in whole requests: whose they are, and that their estimate has no bias."""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.once, needs_library]


@pytest.mark.parametrize(
    ("made", "grow"),
    [
        ("[None] * 20", "one += (None,) * 80"),
        ("bytearray(100)", "one += bytes(390)"),
        ("[None] * 70", "one += (None,) * 40"),
        ("[libc.malloc(100)]", "one[0] = libc.realloc(one[0], 900)"),
    ],
)
def test_a_limit_holds_for_the_growth_of_nobodys_small_blocks(made, grow):
    """Until 2026-11-30 what Python's grew by was in no number: 117 MiB under a limit of 1."""
    check(f"""
        table = [{made} for _ in range(20_000)]  # a module's
        grown, is_refused = 0, False
        try:
            with ctxalloc.request(whole=True, limit_bytes=2 * MiB) as request:
                for one in table:
                    {grow}
                    grown += 1
        except (ctxalloc.BudgetExceeded, ctypes.ArgumentError):  # ctypes makes the latter of a refusal
            is_refused = True
        assert is_refused and 1000 < grown < 8000, (grown, request.stats)
    """)


def test_a_small_block_is_the_requests_that_resizes_it():
    check("""
        for make, grow in [
            (lambda: [None] * 20, lambda one: one.extend([None] * 20)),
            (lambda: [None] * 66, lambda one: one.extend([None] * 50)),
            (lambda: [libc.malloc(200)], lambda one: one.__setitem__(0, libc.realloc(one[0], 900))),
        ]:
            for ends in False, True:
                one, other = ctxalloc.request(whole=True), ctxalloc.request(whole=True, root=True)
                with one as maker:
                    blocks = [make() for _ in range(20_000)]
                    made = maker.stats.live_bytes
                    if not ends:
                        with other as grower:
                            for block in blocks:
                                grow(block)
                if ends:
                    with other as grower:
                        for block in blocks:
                            grow(block)
                # What stays with the maker are the lists themselves.
                assert maker.stats.live_bytes < 0.65 * made, (ends, made, maker.stats)
                assert grower.stats.live_bytes > 0.9 * made, (ends, made, grower.stats)
    """)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("grown_by_malloc(16, 1000, 16)", "1008 + INT"),
        ("grown_by_malloc(600, 1000, 8)", "1008 + INT"),
        ("grown_by_malloc(8, 16, 8)", "32 + INT"),
        ("grown_by_malloc(900, 900, 1, 100)", "112 + INT"),
        ("grown(bytearray(559), bytes(400))", "sys.getsizeof(kept[0])"),
        ("grown([None] * 66, [None] * 50)", "sys.getsizeof(kept[0])"),
        ("grown([], range(100), one_by_one=True)", "sys.getsizeof(kept[0])"),
        ("grown(bytearray(100), bytes(300))", "sys.getsizeof(kept[0])"),
        ("shrunk([None] * 110, 40)", "sys.getsizeof(kept[0])"),
        ("shrunk([None] * 60, 30)", "sys.getsizeof(kept[0])"),
    ],
)
def test_what_is_resized_in_steps_is_estimated_without_bias(made, expected):
    """Until 2026-11-30 62 steps of 16 bytes were estimated as 0.43 of what there was, 513 that grew as half."""
    check(f"""
        INT = 32  # which has the address
        def grown_by_malloc(first, last, step, shrink=0):
            block = libc.malloc(first)
            for size in range(first + step, last + 1, step):
                block = libc.realloc(block, size)
            return libc.realloc(block, shrink) if shrink else block
        def grown(one, more, one_by_one=False):
            for part in more if one_by_one else ():
                one.append(part)
            if not one_by_one:
                one += more
            return one
        def shrunk(one, length):
            del one[length:]
            return one
        found = alive = 0
        for _ in range(16):
            with ctxalloc.request(whole=True) as request:
                kept = [None] * 4000
                before = request.stats.live_bytes
                for at in range(len(kept)):
                    kept[at] = {made}
                found += request.stats.live_bytes - before
                alive += ({expected}) * len(kept)
                if isinstance(kept[0], int):
                    [libc.free(block) for block in kept]
                del kept[:]
        error = 5 * (alive * 32 * KiB) ** 0.5 + 0.03 * alive  # and how pymalloc and glibc round
        assert abs(found - alive) < error, (found, alive, found / alive, error / alive)
    """)


@pytest.mark.parametrize(
    ("made", "shrink"),
    [
        ("bytearray(range(1, 200))", "bytearray.pop"),
        ("bytearray(range(1, 200)) * 3", "bytearray.pop"),
        ("bytearray(range(1, 200)) * 9", "bytearray.pop"),
        ("list(range(1, 65))", "list.pop"),
        ("list(range(1, 250))", "list.pop"),
    ],
)
@pytest.mark.parametrize("is_its_own", [True, False], ids=["its own", "nobodys"])
def test_no_object_that_shrinks_is_refused_at_a_limit(made, shrink, *, is_its_own: bool) -> None:
    """It lost a byte: `bytearray.pop` writes its end before it shrinks, and does not write it back."""
    check(f"""
        LIMIT = 16 * MiB
        objects = [] if {is_its_own} else [{made} for _ in range(4000)]
        steps, sink, errors = [], collections.deque(maxlen=0), 0
        with contextlib.suppress(MemoryError):
            with ctxalloc.request(whole=True, limit_bytes=LIMIT) as request:
                objects = objects or [{made} for _ in range(4000)]
                whole = {made}
                steps = [map({shrink}, objects) for _ in range(len(whole) - 1)]  # which make nothing themselves
                full, more = bytearray(LIMIT - request.stats.live_bytes - 40 * KiB), []
                with contextlib.suppress(MemoryError):
                    while True:
                        more.append(str(len(more)))  # until even what lies beyond the limit is used up
                for step in steps:
                    while True:
                        try:
                            sink.extend(step)
                            break
                        except MemoryError:
                            errors += 1
        assert request.stats.refused > 0 and errors == 0, (errors, request.stats)
        assert all(one == whole[:1] for one in objects)
    """)
