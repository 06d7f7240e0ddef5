"""Arrow's default pool charges the request that called, also on Arrow's own threads."""

import shutil
import subprocess
import textwrap

import pytest
from programs import check, run

pytest.importorskip("pyarrow")

START = """
import pyarrow, pyarrow.csv, pyarrow.parquet
folder = tempfile.mkdtemp()
def written(name, rows):
    table = pyarrow.table({"a": numpy.random.rand(rows), "b": numpy.arange(rows)})
    pyarrow.parquet.write_table(table, f"{folder}/{name}", use_dictionary=False)
    return f"{folder}/{name}"
"""


def checked(program, **options):
    return check(START + textwrap.dedent(program), **options)


def test_files_read_at_once_are_charged_to_the_request_that_reads():
    checked("""
        paths = [written(n, 640_000 * n) for n in (1, 2, 3)]
        barrier, found = threading.Barrier(3), {}
        def read(n):
            with ctxalloc.request(whole=True) as request:
                barrier.wait()
                found[n] = request, pyarrow.parquet.read_table(paths[n - 1], use_threads=True)
        for _ in range(3):
            threads = [threading.Thread(target=read, args=(n,)) for n in (1, 2, 3)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            for n, (request, table) in found.items():
                settled(lambda: request.stats.whole.native_bytes, table.nbytes + 100 * KiB)
                assert request.stats.whole.native_bytes >= table.nbytes
            del table
            requests = [request for request, _ in found.values()]
            found.clear()
            for request in requests:
                settled(lambda: request.stats.whole.native_bytes, 100 * KiB)
    """)


@pytest.mark.parametrize("pool", ["mimalloc", "jemalloc", "system"])
def test_each_of_arrows_allocators_counts_once(pool):
    checked(
        """
        assert pyarrow.default_memory_pool().backend_name == os.environ["ARROW_DEFAULT_MEMORY_POOL"]
        text = io.BytesIO(b"a,b\\n" + b"1,some text that is longer\\n" * 500_000)
        with ctxalloc.request(whole=True) as request:
            assert pyarrow.default_memory_pool().backend_name == os.environ["ARROW_DEFAULT_MEMORY_POOL"]
            table = pyarrow.csv.read_csv(text)
        settled(lambda: request.stats.whole.native_bytes, table.nbytes * 1.15)
        assert request.stats.whole.native_bytes >= table.nbytes
        del table
        settled(lambda: request.stats.whole.native_bytes, 200 * KiB)
        """,
        ARROW_DEFAULT_MEMORY_POOL=pool,
    )


def test_a_limit_is_an_arrow_memory_error_and_others_go_on():
    checked("""
        paths = [written(n, 640_000 * n) for n in (1, 3)]
        pyarrow.parquet.read_table(paths[0])  # imports what it needs
        modest = []
        def others():
            for _ in range(20):
                with ctxalloc.request(whole=True, limit_bytes=60 * MiB) as request:
                    table = pyarrow.parquet.read_table(paths[0])
                    modest.append((request, table.num_rows))
        thread = threading.Thread(target=others)
        thread.start()
        for _ in range(20):
            request = ctxalloc.request(whole=True, limit_bytes=12 * MiB)
            try:
                with request:
                    try:
                        table = pyarrow.parquet.read_table(paths[1])
                    except pyarrow.ArrowMemoryError as error:
                        assert "malloc of size" in str(error), error
                        raise
            except ctxalloc.BudgetExceeded as error:
                assert error.limit_bytes == 12 * MiB
            else:
                raise AssertionError(request.stats)
            assert request.stats.peak_bytes <= 13 * MiB and request.stats.whole.granted == 0, request.stats
            settled(lambda: request.stats.live_bytes, 300 * KiB)
        thread.join()
        assert [rows for _, rows in modest] == [640_000] * 20
        for request, _ in modest:
            settled(lambda: request.stats.live_bytes, 300 * KiB)
    """)


def test_a_buffer_outlives_its_request_and_is_taken_off_when_it_is_freed():
    checked("""
        with ctxalloc.request(whole=True) as request:
            buffer = pyarrow.allocate_buffer(5 * MiB)
            part = pyarrow.py_buffer(buffer).slice(10, 100)
        del buffer
        assert request.stats.whole.native_bytes >= 5 * MiB
        def free():
            global part
            del part
        thread = threading.Thread(target=free)
        thread.start()
        thread.join()
        assert request.stats.whole.native_bytes < 100 * KiB, request.stats
    """)


def test_who_lets_a_buffer_of_an_ended_request_grow_pays():
    checked("""
        with ctxalloc.request(whole=True, limit_bytes=MiB) as first:
            buffers = [pyarrow.allocate_buffer(size, resizable=True) for size in (5000, 64 * KiB, 300 * KiB)]
            for buffer in buffers:
                numpy.frombuffer(buffer, "u1")[:] = 7
        with ctxalloc.request(whole=True) as second:
            for buffer in buffers[:2]:
                buffer.resize(4 * MiB)
                assert set(numpy.frombuffer(buffer, "u1")[:5000]) == {7}
        whole = second.stats.whole
        assert 8 * MiB <= whole.native_bytes < 9 * MiB and first.stats.live_bytes < 400 * KiB, (whole, first.stats)
        buffers[2].resize(2 * MiB)  # nobody's
        assert set(numpy.frombuffer(buffers[2], "u1")[:5000]) == {7}
        assert first.stats.live_bytes < 100 * KiB and first.stats.refused == 0, first.stats
        del buffers, buffer
        settled(lambda: second.stats.live_bytes, 100 * KiB)
    """)


def test_a_pool_of_a_request_that_is_gone_charges_no_other():
    checked("""
        with ctxalloc.request(whole=True):
            pool = pyarrow.default_memory_pool()
        gc.collect()
        later = [ctxalloc.request(whole=True) for _ in range(100)]
        def use():
            kept.append(pyarrow.allocate_buffer(MiB, memory_pool=pool))
        kept = []
        for request in later:
            with request:
                thread = threading.Thread(target=use)
                thread.start()
                thread.join()
        assert all(request.stats.whole.native_bytes < 300 * KiB for request in later)
        with ctxalloc.request(whole=True) as request:
            use()  # on a thread with a request, its own
            assert MiB <= request.stats.whole.native_bytes < 2 * MiB
    """)


def test_what_a_request_opened_others_read_on_their_own_account():
    checked("""
        path = written("file", 640_000)
        with ctxalloc.request(whole=True) as first:
            file = pyarrow.parquet.ParquetFile(path)
        settled(lambda: first.stats.live_bytes, MiB)
        before = first.stats.total_bytes
        with ctxalloc.request(whole=True) as second:
            table = file.read(use_threads=False)
        assert second.stats.whole.native_bytes >= table.nbytes
        assert first.stats.total_bytes - before < 100 * KiB, first.stats
        # On Arrow's own threads the file's pool is that of a request that has ended: nobody's.
        with ctxalloc.request(whole=True, limit_bytes=4 * MiB) as third:
            file.read(use_threads=True)
        assert first.stats.total_bytes - before < 100 * KiB, first.stats
    """)


def test_two_requests_that_do_the_same_are_charged_the_same():
    checked("""
        path = written("file", 640_000)
        pyarrow.parquet.read_table(path)  # imports what it needs
        peaks = []
        for _ in range(4):
            with ctxalloc.request(whole=True) as request:
                table = pyarrow.parquet.read_table(path)
                table.group_by("b").aggregate([("a", "sum")])
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
                again = pyarrow.ipc.open_stream(sink.getvalue()).read_all()
            peaks.append(request.stats.total_bytes)
            del table, sink, again, writer
            settled(lambda: request.stats.live_bytes, 2 * MiB)
        assert max(peaks) < 1.3 * min(peaks), peaks
    """)


def test_a_buffer_is_resized_with_its_contents_in_every_way():
    checked("""
        sizes = [0, 1, 64, 500, 1023, 1024, 5000, 70_000, 3 * MiB, 100, 0, 4 * MiB, 2000, 900, 64]
        for is_whole in (False, True):
            with ctxalloc.request(whole=is_whole) as request:
                for first in sizes:
                    buffer = pyarrow.allocate_buffer(first, resizable=True)
                    for size in sizes:
                        kept = bytes(random.randbytes(min(buffer.size, size)))
                        numpy.frombuffer(buffer, "u1")[: len(kept)] = numpy.frombuffer(kept, "u1")
                        assert buffer.address % 64 == 0 or not buffer.size
                        buffer.resize(size, shrink_to_fit=True)
                        assert buffer.size == size and buffer.to_pybytes()[: len(kept)] == kept
                    if is_whole and first > 4000:
                        assert request.stats.whole.native_bytes < MiB
                builder = pyarrow.array([str(n) * 10 for n in range(20_000)])
                assert builder[-1].as_py() == "19999" * 10
        del buffer, builder
        settled(lambda: request.stats.whole.native_bytes, 100 * KiB)
    """)


def test_small_buffers_are_estimated():
    checked("""
        with ctxalloc.request(whole=True) as request:
            held = [pyarrow.allocate_buffer(200) for _ in range(40_000)]
        seen = request.stats.whole.native_bytes
        assert 7 * MiB < seen < 18 * MiB, request.stats  # with what C++ makes for each
        held.clear()
        assert request.stats.whole.native_bytes < MiB, request.stats
    """)


def test_nobodys_memory_is_made_as_before():
    checked("""
        before = ctxalloc._native._whole_nobodys_bytes() if ctxalloc._native._whole_enable() is None else 0
        buffer = pyarrow.allocate_buffer(5 * MiB)
        assert pyarrow.total_allocated_bytes() == 5 * MiB
        assert ctxalloc._native._whole_nobodys_bytes() - before >= 5 * MiB
        with ctxalloc.request(whole=True) as request:
            other = pyarrow.allocate_buffer(3 * MiB)
            assert pyarrow.total_allocated_bytes() == 8 * MiB
            with ctxalloc.use("default_allocator"):
                third = pyarrow.allocate_buffer(2 * MiB)
            assert 3 * MiB <= request.stats.whole.native_bytes < 4 * MiB
        del buffer, other, third
        assert pyarrow.total_allocated_bytes() == 0
        explicit = pyarrow.allocate_buffer(MiB, memory_pool=pyarrow.mimalloc_memory_pool())
    """)


def test_arrow_that_worked_before_it_began_goes_on():
    checked("""
        path = written("file", 640_000)
        table = pyarrow.parquet.read_table(path)
        buffer = pyarrow.allocate_buffer(1000, resizable=True)
        with ctxalloc.request(whole=True) as request:
            other = pyarrow.parquet.read_table(path)
            buffer.resize(2 * MiB)  # by the pool that made it
            joined = pyarrow.concat_tables([table, other]).combine_chunks()
        sizes = other.nbytes + joined.nbytes
        settled(lambda: request.stats.whole.native_bytes, sizes + 500 * KiB)
        assert request.stats.whole.native_bytes >= sizes
        del table, buffer
        del other, joined
        settled(lambda: request.stats.whole.native_bytes, 300 * KiB)
    """)


def test_a_child_of_fork_frees_and_reads():
    checked("""
        path = written("file", 100_000)
        pyarrow.set_cpu_count(2)
        request = ctxalloc.request(whole=True)
        with request:
            kept = pyarrow.allocate_buffer(5 * MiB)
            stop = False
            def churn():
                with ctxalloc.request(whole=True):
                    while not stop:
                        pyarrow.allocate_buffer(random.randrange(1, 300_000))
            threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
            [thread.start() for thread in threads]
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    before = request.stats.live_bytes
                    del kept
                    ok = before - request.stats.live_bytes >= 5 * MiB
                    more = pyarrow.allocate_buffer(2 * MiB)
                    ok = ok and len(pyarrow.parquet.read_table(path, use_threads=False)) == 100_000
                    os._exit(0 if ok and request.stats.live_bytes >= 2 * MiB else 3)
                assert os.waitpid(child, 0)[1] == 0
            stop = True
            [thread.join() for thread in threads]
            assert request.stats.live_bytes >= 5 * MiB
    """)


def test_the_process_ends_while_tables_live_and_arrow_works():
    ended = run(
        START
        + """
path = written("file", 640_000)
request = ctxalloc.request(whole=True)
request.__enter__()
kept = pyarrow.parquet.read_table(path)
sys.kept = pyarrow.allocate_buffer(MiB)
def churn():
    with ctxalloc.request(whole=True):
        while True:
            pyarrow.parquet.read_table(path)
threading.Thread(target=churn, daemon=True).start()
time.sleep(0.3)
print("end")
"""
    )
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


def test_a_hundred_thousand_requests_leave_nothing_behind():
    checked("""
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096
        def some(count):
            for _ in range(count):
                with ctxalloc.request(whole=True):
                    pyarrow.allocate_buffer(100)
        some(20_000)
        before = resident()
        some(120_000)
        assert resident() - before < 6 * MiB, resident() - before
        with ctxalloc.request(whole=True) as request:
            kept = pyarrow.allocate_buffer(MiB)
            assert request.stats.whole.native_bytes >= MiB
    """)


def test_tasks_and_their_threads_read_on_their_own_account():
    checked("""
        paths = [written(n, 50_000 * n) for n in range(1, 6)]
        async def one(n):
            async with ctxalloc.request(whole=True) as request:
                table = await asyncio.to_thread(pyarrow.parquet.read_table, paths[n])
                await asyncio.sleep(0)
                return request, table, pyarrow.concat_tables([table, table]).combine_chunks()
        async def main():
            return await asyncio.gather(*[one(n) for n in range(5)])
        for request, table, twice in asyncio.run(main()):
            size = table.nbytes + twice.nbytes
            settled(lambda: request.stats.whole.native_bytes, size + 300 * KiB)
            assert request.stats.whole.native_bytes >= size
    """)


def test_pandas_reads_and_its_strings_are_seen_and_limited():
    pytest.importorskip("pandas")
    checked("""
        import pandas
        pandas.DataFrame({"a": [f"some text {n}" for n in range(300_000)]}).to_parquet(f"{folder}/text")
        with ctxalloc.request(whole=True) as request:
            frame = pandas.read_parquet(f"{folder}/text")
        assert request.stats.whole.native_bytes + request.stats.whole.object_bytes > 5 * MiB, request.stats
        del frame
        text = "a,b\\n" + "some text,2.5\\n" * 2_000_000
        for engine in ("pyarrow", "c"):
            request = refused(lambda: pandas.read_csv(io.StringIO(text), engine=engine), 12 * MiB)
            assert request.stats.peak_bytes <= 14 * MiB, (engine, request.stats)
            settled(lambda: request.stats.live_bytes, MiB)
    """)


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler")
def test_an_arrow_with_other_symbols_is_left_alone(tmp_path):
    own = "void *_ZN5arrow19default_memory_poolEv(void) { static int pool; return &pool; }"
    caller = """
        extern void *_ZN5arrow19default_memory_poolEv(void);
        void *call(void) { return _ZN5arrow19default_memory_poolEv(); }
    """
    for name, text, needs in (("own", own, []), ("caller", caller, [f"{tmp_path}/own.so", f"-Wl,-rpath,{tmp_path}"])):
        (tmp_path / f"{name}.c").write_text(text)
        command = ["cc", "-shared", "-fPIC", "-o", f"{tmp_path}/{name}.so", f"{tmp_path}/{name}.c", *needs]
        subprocess.run(command, check=True)
    program = f"""
        import ctypes
        own, caller = ctypes.CDLL("{tmp_path}/own.so"), ctypes.CDLL("{tmp_path}/caller.so")
        own.call = own._ZN5arrow19default_memory_poolEv
        own.call.restype = caller.call.restype = ctypes.c_void_p
        assert own.call() == caller.call() != None
        with ctxalloc.request(whole=True) as request:
            assert own.call() == caller.call() != None
            import pyarrow
            kept = pyarrow.allocate_buffer(MiB)  # pyarrow came second: unseen, and sound
            assert pyarrow.total_allocated_bytes() == MiB
        with ctxalloc.request(whole=True):
            del kept
        """
    check(program)
