"""Whole requests beside guarantees: what is guaranteed to a tenant is there for its objects and native memory too."""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]

HOUSE = """
process = ctxalloc.Budget(64 * MiB, name="process")
patient = ctxalloc.Budget(parent=process, name="patient", guarantee_bytes=24 * MiB)
greedy = ctxalloc.Budget(parent=process, name="greedy")
terms = lambda budget, **more: ctxalloc.request(budget=budget, whole=True, root=True, strict=True, **more)
"""


def test_whoever_is_within_its_guarantee_is_refused_nothing_for_others():
    ended = check(
        HOUSE
        + """
is_over, refused, failed, done = threading.Event(), [0], [], 0

def flood(make):
    while not is_over.is_set():
        try:
            with terms(greedy):
                held = []
                for _ in range(400):
                    held.append(make())
        except MemoryError:
            refused[0] += 1
        held = None

def arrays(): return numpy.empty(MiB, "u1")
def objects(): return [bytes(1000) for _ in range(1000)]
def native(): return zlib.compressobj(), bytearray(500_000)

def patiently():
    with terms(patient):
        # 5 of arrays, 5 of objects, 5 of native memory: with what malloc adds, and Python for itself, below 24.
        held = numpy.empty(5 * MiB, "u1"), [bytes(1000) for _ in range(5000)], bytearray(5 * MiB)
        assert ctxalloc.current_request().stats.whole is not None
        return patient.in_use_bytes

floods = [threading.Thread(target=flood, args=(make,)) for make in (arrays, objects, native)]
for thread in floods: thread.start()
until = time.monotonic() + 60
try:
    while done < 50 or not refused[0]:
        assert time.monotonic() < until, (done, refused)
        used = patiently()
        assert 14 * MiB < used < 24 * MiB, used
        done += 1
except MemoryError as error:
    failed.append(repr(error))
finally:
    is_over.set()
for thread in floods: thread.join()
print(len(failed), refused[0] > 0, *failed)
"""
    )
    assert ended.split() == ["0", "True"], ended


def test_objects_of_others_that_fill_the_process_leave_a_guarantee():
    ended = check(
        HOUSE
        + """
kept = []
def fill():
    try:
        with terms(greedy):
            kept.append(numpy.empty(40 * MiB - 20_000, "u1"))
            while True:
                kept.append(object())
    except ctxalloc.BudgetExceeded as told:
        return told.budget

print(fill())
print(process.in_use_bytes + process.reserved_bytes > 63 * MiB)
with terms(patient, reserve_bytes=8 * MiB, timeout=0):
    mine = numpy.empty(20 * MiB, "u1"), bytearray(2 * MiB), [object() for _ in range(5000)]
    print(patient.in_use_bytes > 22 * MiB)
"""
    )
    assert ended.split() == ["process", "True", "True"], ended
