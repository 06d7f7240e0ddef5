"""The library of `request(whole=True)`: where it can be had, what says that it cannot, and who runs with it."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
from c_extensions import SOURCES, compiler
from whole_programs import check, library_path, needs_library, run

import ctxalloc

pytestmark = pytest.mark.any_numpy


def has_fast_bins() -> bool:
    """Whether glibc has them, and says how much is in them: from 2.33 on, and before 2.43."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return False
    _, version = os.confstr("CS_GNU_LIBC_VERSION").split()
    return tuple(map(int, version.split(".")[:2])) < (2, 43)


needs_fast_bins = pytest.mark.skipif(not has_fast_bins(), reason="the fast bins of glibc 2.33 to 2.42")
FAST_BINS = """
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        class Info(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
        libc.mallinfo2.restype = Info
        in_fast_bins = lambda: libc.mallinfo2().fsmblks
"""


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
@pytest.mark.skipif(sys.version_info < (3, 13), reason="PYTHONMALLOC=mimalloc is there from 3.13 on")
def test_pythons_own_mimalloc_is_an_error():
    ended = run("ctxalloc.request(whole=True)", PYTHONMALLOC="mimalloc")
    assert "PYTHONMALLOC=mimalloc takes Python's objects from an allocator of its own" in ended.stderr


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


@needs_library
def test_what_libraries_let_go_of_is_not_taken_anew_from_the_system():
    """As long as large blocks came back to glibc it kept twice their size, and a request's no longer do."""
    ended = run("""
        import resource
        heap = ctypes.CDLL(None)
        heap.malloc.restype, heap.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        heap.free.argtypes = [ctypes.c_void_p]

        def tree():
            for node in [heap.malloc(1000) for _ in range(1000)]:
                heap.free(node)

        def faults():
            tree()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(20):
                tree()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        with ctxalloc.request(whole=True):
            pass
        print(faults())
        with ctxalloc.request(whole=True):
            print(faults())
    """)
    assert ended.returncode == 0, ended.stderr
    outside, inside = map(int, ended.stdout.split())
    assert max(outside, inside) < 1000, "a tree is 250 pages"


@needs_library
@needs_fast_bins
def test_glibc_keeps_freed_small_blocks_and_merges_them_now_and_then():
    """As in any program, whose large blocks make it merge them: a request's large blocks are none of glibc's."""
    check(
        FAST_BINS
        + """
        with ctxalloc.request(whole=True):
            for block in [libc.malloc(100) for _ in range(5000)]:
                libc.free(block)
            assert in_fast_bins() > 450 * KiB, in_fast_bins()
            for _ in range(20 * MiB // 108):
                libc.free(libc.malloc(100))
            assert in_fast_bins() < 100 * KiB, in_fast_bins()
    """
    )


@needs_library
@needs_fast_bins
def test_a_large_block_that_a_request_frees_has_glibc_merge_small_ones():
    """As without the library. Else threads whose requests have ended keep what these had: four of them 215 MiB."""
    check(
        FAST_BINS
        + """
        blocks = [None] * 50_000  # 400 KB, and so none of glibc's
        with ctxalloc.request(whole=True):
            large = libc.malloc(64 * KiB)
            for n in range(len(blocks)):
                blocks[n] = libc.malloc(100)
            for block in blocks:
                libc.free(block)
            libc.free(large)
            assert in_fast_bins() < 100 * KiB, in_fast_bins()
    """
    )
