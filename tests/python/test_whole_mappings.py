"""Anonymous mappings of libraries, which count for who sets CTXALLOC_WHOLE_MMAP=1."""

import pytest
from whole_programs import check, needs_library, run

pytestmark = [pytest.mark.any_numpy, needs_library]

LIBC = """
    import mmap
    PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    NO_MEMORY, FIXED, MAYMOVE, BOTH, FAILED = 0x4000, 0x10, 1, mmap.PROT_READ | mmap.PROT_WRITE, 2**64 - 1
    sized = ctypes.c_size_t
    for one in libc, without_gil:
        one.mmap.restype = one.mremap.restype = ctypes.c_void_p
        one.mmap.argtypes = [ctypes.c_void_p, sized, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        one.munmap.argtypes = [ctypes.c_void_p, sized]
        one.mremap.argtypes = [ctypes.c_void_p, sized, sized, ctypes.c_int, ctypes.c_void_p]

    FIXED_MOVE, KEEPS = 3, 5  # MAYMOVE with FIXED, and with DONTUNMAP

    def mapped(size, protection=BOTH, flags=PRIVATE, at=None, by=libc):
        start = by.mmap(at, size, protection, flags, -1, 0)
        assert start != FAILED
        return start

    def native(request):
        return request.stats.whole.native_bytes // MiB
"""


def mappings(program: str, **options: str) -> str:
    return check(LIBC + program, **{"CTXALLOC_WHOLE_MMAP": "1", **options})


def test_mappings_are_charged_whole_and_in_parts():
    mappings("""
        with ctxalloc.request(whole=True) as request:
            start = mapped(8 * MiB)
            assert native(request) == 8
            libc.munmap(start + 2 * MiB, MiB)  # in the middle
            assert native(request) == 7
            libc.munmap(start, MiB)
            libc.munmap(start + 7 * MiB, MiB)
            assert native(request) == 5
            mapped(2 * MiB, at=start + 3 * MiB, flags=PRIVATE | FIXED)  # in the place of its own
            mapped(MiB, mmap.PROT_NONE, PRIVATE | FIXED, at=start + 6 * MiB)  # which is none any more
            assert native(request) == 4
        assert native(request) == 4
        libc.munmap(start, 8 * MiB)
        assert request.stats.live_bytes < MiB // 2, request.stats
    """)


def test_mappings_are_followed_as_they_are_moved():
    mappings("""
        with ctxalloc.request(whole=True) as request:
            start = mapped(4 * MiB)
            barrier = mapped(64 * MiB)
            for size, old in (16, 4), (2, 16), (32, 2):
                start = libc.mremap(start, old * MiB, size * MiB, MAYMOVE, None)
                assert start != FAILED and native(request) == size + 64, request.stats
            assert libc.mremap(start, 32 * MiB, 2**50, MAYMOVE, None) == FAILED and native(request) == 96
            libc.munmap(barrier, 64 * MiB)
        libc.munmap(start, 32 * MiB)
        assert request.stats.live_bytes < MiB // 2, request.stats
    """)


def test_calls_that_fail_leave_each_account_as_it_was():
    """They were forgotten first: 256 MiB passed a limit of 64, with `munmap(start, 2**62)` after each."""
    mappings("""
        with ctxalloc.request(whole=True) as request:
            start = mapped(8 * MiB)
            for call in [
                lambda: libc.munmap(start, 2**62),
                lambda: libc.munmap(start, 2**64 - 1),
                lambda: libc.munmap(start + 1, MiB),
                lambda: libc.mmap(start, MiB, BOTH, mmap.MAP_PRIVATE | FIXED, 999, 0),
                lambda: libc.mmap(start, 2**47, BOTH, PRIVATE | FIXED, -1, 0),
                lambda: libc.mmap(start + 1, MiB, BOTH, PRIVATE | FIXED, -1, 0),
                lambda: libc.mremap(start, 8 * MiB, 2**50, MAYMOVE, None),
                lambda: libc.mremap(start, 8 * MiB, 4 * MiB, 2, start),
                lambda: libc.mremap(start, 8 * MiB, 8 * MiB, FIXED_MOVE, start + MiB),
            ]:
                assert call() in (-1, FAILED) and native(request) == 8, request.stats
        libc.munmap(start, 8 * MiB)
        assert native(request) == 0
    """)


def test_mappings_side_by_side_are_moved_as_one():
    mappings("""
        room = mapped(64 * MiB, mmap.PROT_NONE)
        def made():
            with one as first:
                mapped(2 * MiB, flags=PRIVATE | FIXED, at=room)
                with other as second:
                    mapped(2 * MiB, flags=PRIVATE | FIXED, at=room + 2 * MiB)
            return first, second
        def parts(*requests):
            return [native(request) for request in requests]
        one, other = ctxalloc.request(whole=True, root=True), ctxalloc.request(whole=True, root=True)
        first, second = made()
        assert parts(first, second) == [2, 2]
        start = libc.mremap(room, 4 * MiB, 3 * MiB, MAYMOVE, None)
        assert parts(first, second) == [2, 1]
        with ctxalloc.request(whole=True) as third:
            start = libc.mremap(start, 3 * MiB, 40 * MiB, MAYMOVE, None)
        assert parts(first, second, third) == [2, 1, 37]
        elsewhere = mapped(64 * MiB)
        start = libc.mremap(start, 40 * MiB, 3 * MiB, FIXED_MOVE, elsewhere)
        assert start == elsewhere and parts(first, second, third) == [2, 1, 0]
        libc.munmap(start, MiB)
        assert parts(first, second, third) == [1, 1, 0]
        libc.munmap(start, 64 * MiB)
        assert parts(first, second, third) == [0, 0, 0]
        with ctxalloc.request(whole=True) as request:
            start = mapped(4 * MiB)
            copy = libc.mremap(start, 4 * MiB, 4 * MiB, KEEPS, None)
            assert copy == FAILED or native(request) == 8  # the system is too old for it, or both are there
    """)


def test_a_signals_handler_may_map_in_the_midst_of_a_mapping():
    """Who was asked whose a call was took the loader's lock: in a handler that waited for itself."""
    mappings("""
        import signal, faulthandler
        faulthandler.dump_traceback_later(60, exit=True)
        calls = 0
        def handle(number, frame):
            global calls
            calls += 1
            without_gil.munmap(mapped(MiB, by=without_gil), MiB)
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        with ctxalloc.request(whole=True) as request:
            while calls < 2000:
                without_gil.munmap(mapped(MiB, by=without_gil), MiB)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert native(request) == 0
    """)


def test_a_mapping_beyond_a_limit_is_given_and_told():
    """Few libraries look whether they got one."""
    mappings("""
        for by in libc, without_gil:
            got, is_told = [], False
            try:
                with ctxalloc.request(whole=True, limit_bytes=16 * MiB) as request:
                    for _ in range(10):
                        got.append(mapped(4 * MiB, by=by))
            except ctxalloc.BudgetExceeded:
                is_told = True
            assert is_told and 4 <= len(got) <= 7, (by, len(got), request.stats)
            assert request.stats.whole.granted > 0
            del by
    """)


def test_what_is_no_memory_or_counted_elsewhere_is_not_charged():
    mappings("""
        import tempfile
        with tempfile.TemporaryFile() as file, ctxalloc.request(whole=True) as request:
            file.truncate(8 * MiB)
            kept = [mapped(8 * MiB, mmap.PROT_NONE), mapped(8 * MiB, mmap.PROT_READ)]
            kept += [mapped(8 * MiB, flags=PRIVATE | NO_MEMORY), mapped(8 * MiB, 7)]
            kept += [mmap.mmap(file.fileno(), 8 * MiB), numpy.ones(8 * MiB, "u1"), [str(n) for n in range(400_000)]]
            kept += [libc.malloc(8 * MiB)]
        parts = request.stats.whole
        assert parts.native_bytes // MiB == 8 and parts.array_bytes // MiB == 8, parts
        assert 20 * MiB < parts.object_bytes < 40 * MiB, parts
        with ctxalloc.request(whole=True) as request:
            shared = mmap.mmap(-1, 8 * MiB)
            assert native(request) == 8
            shared.close()
            assert native(request) == 0
    """)


def test_mappings_go_by_whichever_thread_or_process_unmaps_them():
    mappings("""
        with ctxalloc.request(whole=True) as request:
            starts = [mapped(MiB) for _ in range(64)]
        threads = [threading.Thread(target=libc.munmap, args=(start, MiB)) for start in starts[:32]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert native(request) == 32
        child = os.fork()
        if child == 0:
            for start in starts[32:]:
                libc.munmap(start, MiB)
            os._exit(native(request))
        assert os.waitpid(child, 0)[1] == 0 and native(request) == 32
        nobodys = ctxalloc.coverage().nobodys_by_thread["the main thread"]
        mapped(64 * MiB)
        assert ctxalloc.coverage().nobodys_by_thread["the main thread"] >= nobodys + 64 * MiB
    """)


def test_many_threads_map_and_unmap_what_their_own_requests_pay_for():
    mappings("""
        def work(seed):
            chance = random.Random(seed)
            with ctxalloc.request(whole=True, root=True) as request:
                live, pages = [], 0
                for step in range(600):
                    if live and chance.random() < 0.5:
                        start, size = live.pop(chance.randrange(len(live)))
                        part = chance.randrange(1, size + 1)
                        without_gil.munmap(start, part * 4096)
                        pages -= part
                        if part < size:
                            live.append((start + part * 4096, size - part))
                    else:
                        size = chance.randrange(1, 40)
                        live.append((mapped(size * 4096, by=without_gil), size))
                        pages += size
                found.append((request.stats.whole.native_bytes, pages * 4096))
                for start, size in live:
                    without_gil.munmap(start, size * 4096)
            after.append(request)
        found, after = [], []
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and all(0 <= native - own < 200 * KiB for native, own in found), found
        assert all(request.stats.whole.native_bytes < 200 * KiB for request in after)
    """)


def test_without_the_choice_none_is_charged():
    for chosen in "", "0":
        program = """
    with ctxalloc.request(whole=True) as request:
        mapped(8 * MiB)
    assert native(request) == 0
        """
        mappings(program, CTXALLOC_WHOLE_MMAP=chosen)
    ended = run("ctxalloc.request(whole=True)", CTXALLOC_WHOLE_MMAP="yes")
    assert ended.returncode == 1
    assert 'CTXALLOC_WHOLE_MMAP="yes"; give 1, or remove it' in ended.stderr, ended.stderr
