"""A module that is imported in a whole request at its limit is imported whole, and the request is told after it.

What is broken off there, no later request can import.
"""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]

HEAVY = """
import tempfile, pathlib
folder = pathlib.Path(tempfile.mkdtemp())
sys.path.insert(0, str(folder))
registered = []

def heavy(name):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text('''
import os, sys, numpy
sys.modules["__main__"].registered.append(__name__)
from . import inner
class Kept:
    def __init__(self, depth):
        self.inner = Kept(depth - 1) if depth else [str(n) for n in range(100)]
words = [str(n) * 20 for n in range(20_000)]
kept = [Kept(10) for _ in range(50)]
array = numpy.ones(100_000)
where = [os.getcwd() for _ in range(100)]  # without the GIL
text = "x" * 500_000
done = True
''')
    (folder / name / "inner.py").write_text("numbers = [bytes(300) for _ in range(3000)]")
    return name
"""

TRIED = (
    HEAVY
    + """
def tried():
    for at, limit_bytes in enumerate([100 * KiB, 300 * KiB, 700 * KiB, MiB, 2 * MiB, 3 * MiB, 4 * MiB]):
        name, steps = heavy(f"heavy_{threading.current_thread().name}_{at}"), 0
        request = ctxalloc.request(whole=True, limit_bytes=limit_bytes)
        try:
            with request:
                __import__(name)
                kept = []
                while steps < 100_000:
                    kept.append(bytes(300))
                    steps += 1
        except ctxalloc.BudgetExceeded:
            pass
        else:
            raise AssertionError(request.stats)
        kept = None
        module = sys.modules[name]
        assert module.done and len(module.words) == 20_000 and len(module.kept) == 50 and module.inner.numbers
        assert registered.count(name) == 1
        assert limit_bytes < request.stats.peak_bytes < 9 * MiB and request.stats.whole.granted, request.stats
        assert steps < 3000, (limit_bytes, steps)  # 256 KiB past the import, and what was left of the limit
        assert __import__(name) is module
"""
)


def test_an_import_is_not_broken_off_on_the_main_thread():
    check(TRIED + "\ntried()")


def test_an_import_is_not_broken_off_on_another_thread():
    check(
        TRIED
        + """
errors = []
def safely():
    try:
        tried()
    except BaseException as error:
        errors.append(error)
        raise
thread = threading.Thread(target=safely, name="other")
thread.start(); thread.join()
assert not errors
"""
    )


def test_an_import_is_not_broken_off_in_a_task():
    check(
        HEAVY
        + """
async def view(name, limit_bytes):
    async with ctxalloc.request(whole=True, limit_bytes=limit_bytes):
        __import__(name)
        await asyncio.sleep(0)
        return [bytes(300) for _ in range(100_000)]

async def main():
    names = [heavy(f"task_{at}") for at in range(6)]
    answers = await asyncio.gather(*[view(name, MiB) for name in names], return_exceptions=True)
    assert all(isinstance(one, ctxalloc.BudgetExceeded) for one in answers), answers
    assert all(sys.modules[name].done for name in names) and len(registered) == 6
asyncio.run(asyncio.wait_for(main(), 60))
"""
    )


def test_what_an_import_gets_has_a_limit_too():
    check(
        HEAVY
        + """
(folder / "huge.py").write_text("kept = []\\nfor _ in range(400): kept.append(bytes(1 << 20))")
request = ctxalloc.request(whole=True, limit_bytes=MiB)
try:
    with request:
        import huge
except ctxalloc.BudgetExceeded:
    pass
else:
    raise AssertionError(request.stats)
assert 250 * MiB < request.stats.peak_bytes <= 258 * MiB, request.stats
assert "huge" not in sys.modules
"""
    )


def test_what_runs_after_an_import_is_refused_as_before():
    check(
        HEAVY
        + """
name = heavy("one")
with ctxalloc.request(whole=True):
    __import__(name)
request = ctxalloc.request(whole=True, limit_bytes=MiB)
try:
    with request:
        import one
        kept = [bytes(2 << 20)]
except ctxalloc.BudgetExceeded:
    pass
else:
    raise AssertionError(request.stats)
assert request.stats.peak_bytes <= MiB, request.stats
"""
    )


WITHIN = (
    HEAVY
    + """
(folder / "serves.py").write_text('''
import ctxalloc
KiB, MiB = 1 << 10, 1 << 20
name = __import__("__main__").heavy("within")
kept, refused = [], None
request = ctxalloc.request(whole=True, limit_bytes=2 * MiB)
try:
    with request:
        __import__(name)
        while len(kept) < 1000:
            kept.append(bytes(100 * KiB))
except ctxalloc.BudgetExceeded as error:
    refused = error
count = len(kept)
kept = None
''')
def tried():
    import serves
    assert serves.refused and serves.count < 20, (serves.count, serves.request.stats)
    # A module that the request itself imports is imported whole, and it is told after that.
    assert sys.modules["within"].done and registered == ["within"]
    assert 2 * MiB < serves.request.stats.peak_bytes < 9 * MiB, serves.request.stats
"""
)


def test_an_import_that_a_request_is_begun_within_gives_it_nothing():
    check(WITHIN + "\ntried()")


def test_nor_does_it_on_another_thread():
    check(WITHIN + "\nfrom concurrent.futures import ThreadPoolExecutor as Pool\nPool().submit(tried).result()")


def test_what_ctxalloc_imports_at_its_first_use_is_nobodys():
    check("""
with ctxalloc.request(whole=True, limit_bytes=100 * KiB) as request:
    ctxalloc.wrap, ctxalloc.ThreadPoolExecutor, ctxalloc.problems, ctxalloc.wsgi
    assert "ctxalloc._executors" in sys.modules and "ctxalloc.wsgi" in sys.modules
assert request.stats.peak_bytes < 40 * KiB, request.stats  # one sample
""")
