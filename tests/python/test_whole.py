"""`request(whole=True)`: native memory and Python objects beside arrays. Each program runs in a process of its own."""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from c_extensions import SOURCES, compiler

import ctxalloc
from ctxalloc import _native

LIBRARY = _native._whole_library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="Linux with glibc, and the feature `whole`")
pytestmark = pytest.mark.any_numpy

START = """
import asyncio, contextvars, ctypes, gc, io, json, os, pickle, random, re, sqlite3, threading, time, zlib
import numpy, ctxalloc
from ctxalloc import MiB, KiB
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.calloc.restype = libc.realloc.restype = ctypes.c_void_p
libc.aligned_alloc.restype = libc.valloc.restype = libc.reallocarray.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.calloc.argtypes = libc.aligned_alloc.argtypes = [ctypes.c_size_t] * 2
libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.reallocarray.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
libc.malloc_usable_size.restype = ctypes.c_size_t
"""


def library_path():
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return made.stdout.strip()


def run(program, *, preload=True, timeout=200, **environment):
    variables = {**os.environ, "PYTHONMALLOC": "", **environment}
    if preload:
        variables["LD_PRELOAD"] = library_path()
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", START + textwrap.dedent(program)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def check(program, **options):
    ended = run(program, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.split()


@needs_library
def test_the_first_requests_of_several_threads_are_counted_each():
    counted = check(
        """
        def one(start):
            start.wait()
            with ctxalloc.request(whole=True) as own:
                held = [bytes(2000) for _ in range(1000)]
                counted.append(own.stats.whole.object_bytes > 2_000_000)
            return held

        counted, start = [], threading.Barrier(8)
        threads = [threading.Thread(target=one, args=(start,)) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(sum(counted))
        """
    )
    assert counted == ["8"]


def test_a_whole_request_without_its_library_is_an_error_that_says_why():
    if os.environ.get("LD_PRELOAD"):
        pytest.skip("this process may have the library")
    with pytest.raises(RuntimeError, match=r"request\(whole=True\) cannot be had.*"):
        ctxalloc.request(whole=True)


@needs_library
def test_the_environment_is_an_error_at_import_where_it_cannot_be_had():
    ended = run("", preload=False, CTXALLOC_WHOLE="1")
    assert ended.returncode == 1
    assert "CTXALLOC_WHOLE=1, but request(whole=True) cannot be had" in ended.stderr


@needs_library
def test_where_nothing_is_preloaded_it_is_an_error():
    ended = run("ctxalloc.request(whole=True)", preload=False, LD_PRELOAD="")
    assert "its library is not loaded" in ended.stderr


@needs_library
@pytest.mark.skipif(not compiler(), reason="there is no C compiler here")
@pytest.mark.parametrize(
    ("options", "before", "says"),
    [
        (("-pie", "-fPIE"), False, "first"),
        (("-no-pie", "-fno-pie"), False, "first"),
        (("-no-pie", "-fno-pie"), True, "behind"),
        (("-no-pie", "-fno-pie", "-rdynamic", "-DOWN"), False, "behind"),
    ],
)
def test_it_knows_whether_it_is_first_in_any_program(tmp_path, options, before, says):
    """Debian's Python 3.14 is no PIE, and takes malloc's address."""
    program, library = tmp_path / "program", tmp_path / "before.so"
    command = [*compiler(), "-O1", "-fno-builtin"]
    subprocess.run([*command, *options, "-o", program, SOURCES / "way_to_malloc.c", "-ldl"], check=True)
    subprocess.run([*command, "-shared", "-fPIC", "-o", library, SOURCES / "before_malloc.c", "-ldl"], check=True)
    preload = f"{library}:{library_path()}" if before else library_path()
    environment = {**os.environ, "LD_PRELOAD": preload}
    ran = subprocess.run([program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == f"{says}\n"


@needs_library
def test_without_an_address_space_it_is_an_error():
    ended = run("""
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        for _ in range(2):
            try:
                ctxalloc.request(whole=True)
            except RuntimeError as error:
                print(error)
            else:
                raise AssertionError('none')
    """)
    assert ended.returncode == 0, ended.stderr
    assert "raise `ulimit -v`" in ended.stdout


@needs_library
def test_programs_of_others_run_with_it_as_without():
    listed = [
        subprocess.run(["ls", "/"], env={**os.environ, "LD_PRELOAD": path}, capture_output=True, check=True).stdout
        for path in ("", library_path())
    ]
    assert listed[0] == listed[1]


@needs_library
def test_native_blocks_of_a_kibibyte_and_more_are_exact():
    check("""
        with ctxalloc.request(whole=True) as request:
            blocks = [libc.malloc(1024), libc.calloc(10, 1000), libc.aligned_alloc(4096, 8192),
                      libc.aligned_alloc(1 << 21, 5000), libc.valloc(3000), libc.reallocarray(None, 3, 1111)]
            place = ctypes.c_void_p()
            assert libc.posix_memalign(ctypes.byref(place), ctypes.c_size_t(256), ctypes.c_size_t(7777)) == 0
            blocks.append(place.value)
            sizes = [1024, 10000, 8192, 5000, 3000, 3333, 7777]
            aligns = [16, 16, 4096, 1 << 21, 4096, 16, 256]
            for block, size, align in zip(blocks, sizes, aligns):
                assert block % align == 0 and libc.malloc_usable_size(block) >= size
            large = lambda: request.stats.whole.native_bytes - sum(sizes)
            small = large()
            assert 0 <= small < 200 * KiB, small
            blocks[0] = libc.realloc(blocks[0], 500_000)
            assert large() == small + 500_000 - 1024
            blocks[3] = libc.realloc(blocks[3], 300_000)
            assert large() == small + 500_000 - 1024 + 295_000
        for block in blocks:
            libc.free(block)
        assert request.stats.whole.native_bytes == small
    """)


@needs_library
def test_an_object_above_512_bytes_is_exact_and_an_array_counts_once():
    check("""
        with ctxalloc.request(whole=True) as request:
            before = request.stats.whole
            kept = bytearray(5 * MiB), numpy.ones(MiB)
            after = request.stats.whole
            assert after.array_bytes - before.array_bytes == 8 * MiB
            assert after.object_bytes - before.object_bytes == 5 * MiB + 1
            assert request.stats.live_bytes == after.array_bytes + after.native_bytes + after.object_bytes
        for strategy in (ctxalloc.strategies.System(), ctxalloc.strategies.Aligned()):
            with ctxalloc.request(whole=True, strategy=strategy) as request:
                array = numpy.ones(MiB)
                assert 8 * MiB <= request.stats.live_bytes < 9 * MiB, request.stats
    """)


@needs_library
@pytest.mark.parametrize("size", [8, 64, 200, 400])
def test_small_objects_are_estimated_within_four_times_the_stated_error(size):
    check(f"""
        with ctxalloc.request(whole=True) as request:
            held = [bytes({size}) + b"%d" % n for n in range(16 * MiB // {size})]
        import sys
        true = sum((sys.getsizeof(one) + 15) // 16 * 16 for one in held) + sys.getsizeof(held)
        whole = request.stats.whole
        assert whole.error_bytes > 0
        assert abs(whole.object_bytes - true) < 4 * whole.error_bytes + 64 * KiB, (whole, true)
        assert whole.error_bytes < true // 10
        del held
        gc.collect()
        assert request.stats.live_bytes < 300 * KiB, request.stats  # of it 131,072: where pymalloc has its arenas
    """)


@needs_library
def test_tasks_their_threads_and_their_children_are_their_requests():
    check("""
        async def child(size):
            await asyncio.sleep(0)
            return bytearray(size)
        async def one(number):
            size = number * 100_000
            async with ctxalloc.request(whole=True) as request:
                held = []
                for _ in range(10):
                    held.append(bytearray(size))
                    await asyncio.sleep(0)
                    held.append(await asyncio.to_thread(bytearray, size))
                    held.append(await asyncio.create_task(child(size)))
                return request, 30 * (size + 1), held
        async def main():
            return await asyncio.gather(*[one(number) for number in range(1, 21)])
        answers = asyncio.run(main())
        for request, expected, held in answers:
            assert expected <= request.stats.live_bytes < expected + 400 * KiB, (expected, request.stats)
        requests = [request for request, *_ in answers]
        del answers, request, expected, held
        gc.collect()
        assert all(request.stats.live_bytes < 200 * KiB for request in requests)
    """)


@needs_library
def test_what_was_selected_before_is_forgotten_when_a_request_is_left():
    # Other variables make CPython allocate as it takes NumPy's out: the old value must not be cached again then.
    check(
        """
        import asyncio, contextvars, decimal
        for number in range(10):
            contextvars.ContextVar(str(number)).set(number)
        decimal.getcontext()
        async def nothing():
            pass
        for _ in range(100):
            with ctxalloc.request(whole=True) as inside:
                data = [bytearray(2000) for _ in range(10)]
            assert ctxalloc.current_request() is None, ctxalloc.current_request()
            with ctxalloc.request(whole=True, limit_bytes=10_000_000):
                asyncio.run(nothing())
        """
    )


@needs_library
def test_a_threads_memory_is_the_requests_that_it_carries_or_nobodys():
    check("""
        held = []
        make = lambda: held.append(bytearray(5 * MiB))
        def run(target):  # in no request, also where threads inherit their context
            thread = threading.Thread(target=contextvars.Context().run, args=(target,))
            thread.start()
            thread.join()
        before = ctxalloc._native._whole_nobodys_bytes()
        with ctxalloc.request(whole=True) as request:
            run(make)
            assert request.stats.live_bytes < MiB
            assert ctxalloc._native._whole_nobodys_bytes() - before >= 5 * MiB
            run(ctxalloc.wrap(make))
            assert 5 * MiB <= request.stats.live_bytes < 6 * MiB
            with ctxalloc.ThreadPoolExecutor(1) as pool:
                pool.submit(make).result()
            assert 10 * MiB <= request.stats.live_bytes < 11 * MiB
    """)


@needs_library
def test_inside_a_whole_request_one_of_arrays_leaves_it_the_rest():
    check("""
        with ctxalloc.request(whole=True) as outer:
            with ctxalloc.request(limit_bytes=MiB) as inner:
                kept = bytearray(5 * MiB), numpy.ones(1000)
                assert inner.stats.live_bytes == 8000 and inner.stats.whole is None
            assert outer.stats.live_bytes >= 5 * MiB + 8000
            with ctxalloc.request(whole=True) as inner:
                more = bytearray(3 * MiB)
                assert inner.stats.live_bytes >= 3 * MiB
            assert outer.stats.live_bytes >= 8 * MiB
            with ctxalloc.request(root=True) as apart:
                other = bytearray(7 * MiB)
            assert outer.stats.live_bytes < 9 * MiB
    """)


@needs_library
def test_random_programs_agree_with_a_naive_model():
    check("""
        seed = 20261124
        rnd = random.Random(seed)
        requests = [ctxalloc.request(whole=True, root=True) for _ in range(5)]
        handlers, sums, blocks = [], [0] * 5, []
        for request in requests:
            request._begin()
            handlers.append(request.handler)
        sizes = lambda: rnd.choice([1024, 1500, 4096, 20_000, 70_000, 300_000, rnd.randrange(1024, 600_000)])
        lock = threading.Lock()
        def step():
            owner = rnd.randrange(5)
            token = ctxalloc.set_handler(handlers[owner])
            what = rnd.random()
            if what < 0.5 or not blocks:
                size = sizes()
                kind = rnd.randrange(3)
                block = [libc.malloc, lambda n: libc.calloc(1, n), lambda n: libc.aligned_alloc(256, n)][kind](size)
                if kind == 1:
                    assert not any(ctypes.string_at(block, size))
                ctypes.memset(block, owner + 1, size)
                blocks.append((block, size, owner, owner + 1))
                sums[owner] += size
            elif what < 0.75:
                block, size, whose, mark = blocks.pop(rnd.randrange(len(blocks)))
                new = sizes()
                block = libc.realloc(block, new)
                text = ctypes.string_at(block, min(size, new))
                assert text == bytes([mark]) * len(text)
                ctypes.memset(block, mark, new)
                blocks.append((block, new, whose, mark))
                sums[whose] += new - size
            else:
                block, size, whose, mark = blocks.pop(rnd.randrange(len(blocks)))
                text = ctypes.string_at(block, size)
                assert text == bytes([mark]) * size, seed
                libc.free(block)
                sums[whose] -= size
            ctxalloc.reset(token)
        def work():
            for _ in range(1000):
                with lock:
                    step()
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for number, request in enumerate(requests):
            if number == 2:
                request._end(None)
        native = [request.stats.whole.native_bytes for request in requests]
        small = [one - sums[number] for number, one in enumerate(native)]
        assert all(0 <= one < 400 * KiB for one in small), (native, sums)
        while blocks:
            block, size, whose, _ = blocks.pop()
            libc.free(block)
        assert all(request.stats.whole.native_bytes < 400 * KiB for request in requests)
    """)


@needs_library
def test_a_child_of_fork_frees_what_its_parent_made():
    check("""
        stop = False
        request = ctxalloc.request(whole=True)
        request.__enter__()
        def churn():
            rnd, held = random.Random(), []
            with ctxalloc.request(whole=True):
                while not stop:
                    held.append(bytearray(rnd.choice([100, 2000, 70_000, 400_000])))
                    if len(held) > 50:
                        del held[rnd.randrange(50)]
        # Daemons: a failure below must not wait for them.
        threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
        [thread.start() for thread in threads]
        kept = [bytearray(100_000) for _ in range(50)]
        few_samples = 200_000  # the objects of the test itself may be among the samples, each of some 16 KiB
        for number in range(30):
            pid = os.fork()
            if pid == 0:
                before = request.stats.live_bytes
                kept.clear()
                ok = abs(before - request.stats.live_bytes - 50 * 100_001) < few_samples
                more = [bytearray(50_000) for _ in range(100)]
                os._exit(0 if ok and request.stats.live_bytes >= 100 * 50_001 else 3)
            assert os.waitpid(pid, 0)[1] == 0, number
        stop = True
        [thread.join() for thread in threads]
        assert request.stats.live_bytes >= 50 * 100_001
    """)


GREEDY = {
    "bytes": "work = lambda: bytes(60 * MiB)",
    "str": "work = lambda: 'x' * (60 * MiB)",
    "list": "work = lambda: [str(n) * 200 for n in range(100_000)]",
    "dict": "work = lambda: {n: n for n in range(1_000_000)}",
    "numpy": "work = lambda: numpy.ones(8 * MiB)",
    "json": "text = json.dumps([{'a': n, 'b': 'x' * 50} for n in range(200_000)]); work = lambda: json.loads(text)",
    "pickle": "text = pickle.dumps([str(n) * 20 for n in range(300_000)]); work = lambda: pickle.loads(text)",
    "re": "text = 'ab ' * 2_000_000; work = lambda: re.findall('[a-z]+', text)",
    "zlib": "text = zlib.compress(bytes(60 * MiB)); work = lambda: zlib.decompress(text)",
    "sqlite3": """
        base = sqlite3.connect(":memory:")
        base.execute("create table t(a)")
        work = lambda: base.executemany("insert into t values(?)", [("x" * 10_000,) for _ in range(5000)])
    """,
    "PIL": "from PIL import Image; work = lambda: Image.new('RGB', (6000, 4000))",
    "lxml": """
        from lxml import etree
        text = b"<a>" + b"<b c='1'>text</b>" * 300_000 + b"</a>"
        work = lambda: etree.fromstring(text)
    """,
}


@needs_library
@pytest.mark.parametrize("name", GREEDY)
def test_a_library_that_survives_is_held_to_the_limit(name):
    if importlib.util.find_spec(name if name in {"PIL", "lxml"} else "json") is None:
        pytest.skip(f"{name} is not installed here")
    check(
        textwrap.dedent(GREEDY[name])
        + textwrap.dedent("""
        request, kept = ctxalloc.request(whole=True, limit_bytes=12 * MiB), None
        try:
            with request:
                kept = work()
        except Exception as error:
            assert isinstance(error, ctxalloc.BudgetExceeded) or type(error).__name__ == "XMLSyntaxError", repr(error)
        else:
            raise AssertionError(request.stats)
        assert request.stats.peak_bytes <= 13 * MiB, request.stats
        assert request.stats.whole.granted == 0
        base = kept = None
        gc.collect()
        assert request.stats.live_bytes < 300 * KiB, request.stats
        with ctxalloc.request(whole=True, limit_bytes=12 * MiB):
            next_one = [str(n) for n in range(10_000)], bytearray(MiB)
        """)
    )


@needs_library
@pytest.mark.parametrize("name", ["orjson", "pydantic"])
def test_a_library_that_would_die_gets_its_block_and_the_request_ends(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed here")
    work = {
        "orjson": "import orjson; text = orjson.dumps(['x' * 50] * 500_000); work = lambda: orjson.loads(text)",
        "pydantic": """
            import pydantic
            reader = pydantic.TypeAdapter(list[str])
            text = reader.dump_json(['x' * 50] * 500_000)
            work = lambda: reader.validate_json(text)
        """,
    }[name]
    check(
        textwrap.dedent(work)
        + textwrap.dedent("""
        try:
            with ctxalloc.request(whole=True, limit_bytes=4 * MiB) as request:
                kept = work()
        except ctxalloc.BudgetExceeded:
            assert request.stats.whole.granted > 0
        else:
            raise AssertionError(request.stats)
        kept = None
        gc.collect()
        assert request.stats.live_bytes < 600 * KiB
        with ctxalloc.request(whole=True, limit_bytes=4 * MiB):
            bytearray(MiB)
        """)
    )


@needs_library
def test_a_program_that_handles_refusals_goes_on_below_its_limit():
    check("""
        refused = 0
        with ctxalloc.request(whole=True, limit_bytes=16 * MiB) as request:
            held = []
            for _ in range(500):
                try:
                    held.append(bytearray(100_000))
                except MemoryError as error:
                    refused += 1
                    text = "handled: " + repr(error) * 10
                    held.pop()
        assert refused > 100 and request.stats.peak_bytes <= 17 * MiB
    """)


@needs_library
@pytest.mark.parametrize("allocator", ["debug", "malloc", "malloc_debug", "pymalloc_debug"])
def test_each_of_pythons_allocators_counts_once(allocator):
    check(
        """
        with ctxalloc.request(whole=True) as request:
            kept = ["%064d" % n for n in range(100_000)]
            large = bytearray(5 * MiB)
        assert 15 * MiB < request.stats.live_bytes < 32 * MiB, request.stats
        assert 5 * MiB <= request.stats.live_bytes
        """,
        PYTHONMALLOC=allocator,
    )


@needs_library
def test_run_whole_starts_the_program_with_the_library(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("kept = bytearray(30 << 20)\nprint('ran')\n")
    command = [sys.executable, "-m", "ctxalloc", "run", "--whole"]
    ended = subprocess.run([*command, "--report", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "ran\n"
    assert "the whole program: 3" in ended.stderr
    refused = subprocess.run([*command, "--limit", "20MiB", script], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "BudgetExceeded" in refused.stderr


@needs_library
def test_a_service_answers_413_and_serves_the_next(tmp_path):
    check("""
        import httpx
        from starlette.applications import Starlette
        from starlette.responses import PlainTextResponse
        from starlette.routing import Route
        from ctxalloc.asgi import AllocatorMiddleware
        async def greedy(request):
            return PlainTextResponse(str(len(json.loads(text))))
        async def modest(request):
            return PlainTextResponse(str(ctxalloc.current_request().stats.whole is not None))
        text = json.dumps([{"a": n, "b": "x" * 50} for n in range(200_000)])
        application = Starlette(routes=[Route("/greedy", greedy), Route("/modest", modest)])
        served = AllocatorMiddleware(application, default=ctxalloc.request(limit_bytes=16 * MiB, whole=True))
        async def main():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://t") as client:
                answers = await asyncio.gather(*[client.get(path) for path in ["/modest", "/greedy"] * 3])
                return [(one.status_code, one.text[:4]) for one in answers]
        answers = asyncio.run(main())
        assert answers[::2] == [(200, "True")] * 3, answers
        assert all(status in (413, 429, 503) for status, _ in answers[1::2]), answers
    """)


@needs_library
def test_what_is_made_without_the_gil_first_in_a_context_is_its_requests():
    """Nothing of Python's is made between the switch to the Context and the call, which lets go of the GIL."""
    check("""
        malloc, size = libc.malloc, 5 * MiB  # ctypes.CDLL lets go of the GIL
        def called(context, function, *arguments):
            thread = threading.Thread(target=context.run, args=(function, *arguments))
            thread.start()
            thread.join()
        others = [contextvars.ContextVar(f"other {n}") for n in range(1000)]
        expected = 0
        with ctxalloc.request(whole=True) as request:
            for count in 0, 1, 2, 5, 16, 17, 33, 100, 1000:
                context = contextvars.copy_context()
                for other in others[:count]:
                    context.run(other.set, count)
                for _ in range(3):
                    called(context, malloc, size)
                    expected += size
                assert expected <= request.stats.whole.native_bytes < expected + MiB, (count, request.stats)
            with ctxalloc.request(whole=True) as inner:
                called(contextvars.copy_context(), malloc, size)
            assert size <= inner.stats.whole.native_bytes < size + 100 * KiB, inner.stats
            with ctxalloc.use("pool"):
                called(contextvars.copy_context(), malloc, size)
            called(contextvars.Context(), malloc, size)
        before = request.stats.whole.native_bytes
        assert before < expected + size + MiB
        for count in 0, 1, 20, 500:
            context = contextvars.Context()
            for other in others[:count]:
                context.run(other.set, count)
            called(context, malloc, size)
        assert request.stats.whole.native_bytes == before
        context = contextvars.copy_context()
        def switched():
            # Both ways on one thread.
            with ctxalloc.request(whole=True) as own:
                inside = contextvars.copy_context()
            for n in range(50):
                inside.run(malloc, size)
                context.run(malloc, size)
            return own
        own = switched()
        assert 50 * size <= own.stats.whole.native_bytes < 51 * size + MiB, own.stats
    """)


@needs_library
@pytest.mark.skipif(not compiler(), reason="there is no C compiler here")
def test_many_libraries_with_thread_locals_are_opened(tmp_path):
    """The loader resizes a thread's table of them inside of an access to one, also of Rust's."""
    source, first = tmp_path / "one.c", tmp_path / "library-0.so"
    source.write_text("__thread int counted; int count(void) { return ++counted; }")
    subprocess.run([*compiler(), "-O1", "-shared", "-fPIC", "-o", first, source], check=True)
    for number in range(1, 200):
        shutil.copy(first, tmp_path / f"library-{number}.so")
    check(f"""
        def work():
            for number in range(200):
                libraries.append(ctypes.CDLL({str(tmp_path)!r} + f"/library-{{number}}.so"))
                kept.append(bytearray(2000))
                assert libraries[-1].count() >= 1
        libraries, kept = [], []
        with ctxalloc.request(whole=True) as request:
            work()
            threads = [threading.Thread(target=ctxalloc.wrap(work)) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
        assert request.stats.whole.object_bytes >= 5 * 200 * 2000
    """)
