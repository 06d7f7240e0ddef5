"""`request(whole=True)`: native memory and Python objects beside arrays. Each program runs in a process of its own."""

import pytest
from whole_programs import check, needs_library

pytestmark = pytest.mark.any_numpy


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
    assert counted.split() == ["8"]


@needs_library
def test_an_object_above_512_bytes_is_exact_and_an_array_counts_once():
    check("""
        for _ in range(50):
            with ctxalloc.request(whole=True) as request:
                before = request.stats.whole
                kept = bytearray(5 * MiB), numpy.ones(MiB)
                stats = request.stats
                after = stats.whole
                assert after.array_bytes - before.array_bytes == 8 * MiB
                assert stats.live_bytes == after.array_bytes + after.native_bytes + after.object_bytes
            if after.error_bytes == 0:
                break  # no small object between the two was a sample, of which one in thirty is
        assert after.object_bytes - before.object_bytes == 5 * MiB + 1, after
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
        asyncio.run(asyncio.to_thread(bytearray, 1))  # what is imported and made once is nobody's
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
        few_samples = 200_000  # the objects of the test itself may be among the samples, each of some 32 KiB
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


@needs_library
def test_what_is_made_without_the_gil_first_in_a_context_is_its_requests():
    """Nothing of Python's is made between the switch to the Context and the call, which lets go of the GIL."""
    check("""
        libc = without_gil
        malloc, size = libc.malloc, 5 * MiB
        def called(context, function, *arguments):
            thread = threading.Thread(target=context.run, args=(function, *arguments))
            thread.start()
            thread.join()
            while os.path.exists(f"/proc/self/task/{thread.native_id}"):
                time.sleep(0.0001)  # it frees its state after whoever joins it goes on
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
