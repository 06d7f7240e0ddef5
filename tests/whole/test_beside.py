"""Other libraries before malloc, profilers of memory, and processes where the whole request cannot be had."""

import functools
import importlib.util
import shutil
import subprocess
import sys

import pytest
from programs import check, run

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler")

# An allocator of its own, as jemalloc and mimalloc are one: its blocks are its own to free.
OTHER = """
#include <stddef.h>
#include <string.h>
#include <errno.h>
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);
struct head { size_t size, offset; };
long other_live;
void *memalign(size_t align, size_t size) {
    if (align < 16) align = 16;
    size_t offset = align < 32 ? 32 : align;
    char *start = __libc_memalign(offset, size + offset);
    if (!start) { errno = ENOMEM; return NULL; }
    struct head *head = (struct head *)(start + offset) - 1;
    head->size = size; head->offset = offset;
    __atomic_add_fetch(&other_live, 1, __ATOMIC_RELAXED);
    return start + offset;
}
void *malloc(size_t size) { return memalign(16, size); }
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }
int posix_memalign(void **place, size_t align, size_t size) { return (*place = memalign(align, size)) ? 0 : ENOMEM; }
void *calloc(size_t n, size_t each) { void *p = malloc(n * each); return p ? memset(p, 0, n * each) : p; }
void free(void *p) {
    if (!p) return;
    __atomic_sub_fetch(&other_live, 1, __ATOMIC_RELAXED);
    __libc_free((char *)p - ((struct head *)p - 1)->offset);
}
size_t malloc_usable_size(void *p) { return p ? ((struct head *)p - 1)->size : 0; }
void *realloc(void *old, size_t size) {
    void *p = malloc(size);
    if (p && old) { size_t n = malloc_usable_size(old); memcpy(p, old, n < size ? n : size); free(old); }
    return p;
}
"""

COUNTS = """
    with ctxalloc.request(whole=True) as request:
        kept = [bytearray(5 * MiB), [str(n) for n in range(200_000)], json.loads("[" + "0," * 100_000 + "1]")]
    assert 15 * MiB < request.stats.live_bytes < 30 * MiB, request.stats
    try:
        with ctxalloc.request(whole=True, limit_bytes=8 * MiB):
            [str(n) * 20 for n in range(200_000)]
    except ctxalloc.BudgetExceeded:
        pass
    else:
        raise AssertionError("not refused")
    del kept
    settled(lambda: request.stats.live_bytes, MiB)
"""


def compiled(folder, name, text):
    (folder / f"{name}.c").write_text(text)
    command = ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", f"{folder}/{name}.so", f"{folder}/{name}.c"]
    subprocess.run(command, check=True)
    return f"{folder}/{name}.so"


@needs_compiler
def test_an_allocator_that_is_named_behind_it_serves_all_other_blocks(tmp_path):
    other = compiled(tmp_path, "other", OTHER)
    check(
        COUNTS
        + """
    import ctypes
    assert ctypes.c_long.in_dll(ctypes.CDLL(None), "other_live").value > 1000
    """,
        preload="{}:" + other,
    )


@needs_compiler
def test_an_allocator_that_is_named_before_it_is_an_error(tmp_path):
    other = compiled(tmp_path, "other", OTHER)
    ended = run("ctxalloc.request(whole=True)", preload=other + ":{}")
    assert ended.returncode == 1
    assert "another library stands before it: name ctxalloc's first in LD_PRELOAD" in ended.stderr


# jemalloc 5.3, mimalloc 2.0.9 and tcmalloc 2.10 of Debian: LD_LIBRARY_PATH tells where they are, if they are not
# installed (`make target/allocators`).
PRELOADED = ["libjemalloc.so.2", "libmimalloc.so.2", "libtcmalloc_minimal.so.4"]


@functools.cache
def is_there(name):
    return name[:8] in run("print(open('/proc/self/maps').read())", preload=name).stdout


def preload_before(name):
    """LD_PRELOAD with this allocator behind the library; none for glibc's."""
    if name and not is_there(name):
        pytest.skip(f"{name} is not there")
    return "{}:" + name if name else "{}"


@pytest.mark.parametrize("name", PRELOADED)
def test_an_allocator_that_people_preload_serves_other_blocks_or_is_told(name):
    check(COUNTS + f"assert {name!r}[:8] in open('/proc/self/maps').read()", preload=preload_before(name))
    ended = run("ctxalloc.request(whole=True)", preload=name + ":{}")
    assert ended.returncode == 1
    assert "another library stands before it: name ctxalloc's first in LD_PRELOAD" in ended.stderr


@pytest.mark.parametrize("name", PRELOADED)
def test_mappings_of_the_allocator_behind_it_are_not_charged(name):
    check(COUNTS, preload=preload_before(name), CTXALLOC_WHOLE_MMAP="1")


LIBC = """
    import ctypes
    libc = ctypes.CDLL(None)
    for name in "malloc", "realloc", "memalign":
        getattr(libc, name).restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.memalign.argtypes = [ctypes.c_size_t], [ctypes.c_size_t, ctypes.c_size_t]
    libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.free.argtypes = libc.malloc_usable_size.argtypes = [ctypes.c_void_p]

    def resized(first, *others, align=0):
        block = libc.memalign(align, first) if align else libc.malloc(first)
        for size in others:
            block = libc.realloc(block, size)
        return block

    def taken(block):  # glibc has 8 bytes more than can be used; with others that is a multiple of 16 and more
        return -(-libc.malloc_usable_size(block) // 16) * 16
"""


@pytest.mark.parametrize("name", ["", *PRELOADED])
def test_resized_small_blocks_are_estimated_whatever_stands_behind(name):
    """As what their allocator has for them. Those that had room were in no number once: jemalloc has 1024 for 900."""
    check(
        LIBC
        + """
    def text():
        made = ""
        for _ in range(70):
            made += "0123456"
        return made

    INT = 32  # each block's address
    for make in [
        lambda: resized(900, 1000),
        lambda: resized(100, 110),
        lambda: resized(520, 600),
        lambda: resized(900, 950, 1000, 1020),
        lambda: resized(1000, 600, 1000),
        lambda: resized(1000, 600),
        lambda: resized(1000, 1024),
        lambda: resized(600, 1000, align=1024),
        lambda: resized(100, 200, align=256),
        lambda: resized(100, 1500, align=4096),
        lambda: resized(100, 1500, align=2048),
        lambda: resized(*range(200, 250, 8)),  # tcmalloc has a quarter more
        lambda: resized(1000, *range(990, 900, -10), 1000),  # glibc leaves it rests that are too small for a block
        text,
    ]:
        found = alive = 0
        for _ in range(8):
            with ctxalloc.request(whole=True) as request:
                kept = [None] * 4000
                before = request.stats.live_bytes
                for at in range(len(kept)):
                    kept[at] = make()
                found += request.stats.live_bytes - before
                for block in kept:
                    if isinstance(block, int):
                        alive += taken(block) if libc.malloc_usable_size(block) < 1500 else 1500
                        alive += INT
                        libc.free(block)
                    else:
                        alive += taken(id(block))
                del kept, block
        error = 5 * (alive * 32 * KiB) ** 0.5 + 0.03 * alive
        assert abs(found - alive) < error, (alive / 32000, found / alive, error / alive)
    """,
        preload=preload_before(name),
    )


@pytest.mark.parametrize("name", ["", *PRELOADED])
def test_a_limit_holds_for_resized_blocks_whatever_stands_behind(name):
    check(
        LIBC
        + """
    REFUSED = ctxalloc.BudgetExceeded, MemoryError, ctypes.ArgumentError  # ctypes makes the last one of a MemoryError

    def until_refused(*sizes):
        kept = []
        try:
            with ctxalloc.request(whole=True, limit_bytes=8 * MiB) as request:
                while len(kept) * sizes[-1] < 100 * MiB and (block := resized(*sizes)):
                    kept.append(block)
        except REFUSED:
            assert request.stats.peak_bytes > 7 * MiB, request.stats
        return kept

    for sizes in (100, 110), (900, 1000), (1000, 600, 1000):
        kept = until_refused(*sizes)
        alive = len(kept) * (taken(kept[0]) + 48)  # its address, and its place in the list
        assert 7 * MiB < alive < 10 * MiB, (sizes, alive / MiB)
    """,
        preload=preload_before(name),
    )


SHRINKING = """
#include <stdlib.h>
void make(void **blocks, int count, size_t size) { while (count--) blocks[count] = malloc(size); }
int resize(void **blocks, int count, size_t size) {
    int left = 0;
    while (count--) {
        void *block = realloc(blocks[count], size);
        if (block) blocks[count] = block;
        else left++;
    }
    return left;
}
"""


@needs_compiler
@pytest.mark.parametrize("name", ["", *PRELOADED])
def test_no_block_that_shrinks_is_refused_or_passes_a_limit(name, tmp_path):
    shrinking = compiled(tmp_path, "shrinking", SHRINKING)
    check(
        f"""
    import ctypes
    blocks = ctypes.CDLL({shrinking!r})
    blocks.make.argtypes = blocks.resize.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    COUNT = 6000

    def sampled_now(request):  # the next 16 KiB of small blocks have no sample: so this code itself gets none
        live, made = request.stats.live_bytes, []
        while request.stats.live_bytes < live + 16 * KiB:
            made.append(bytes(100))
        return made

    for is_its_own in True, False:
        table = (ctypes.c_void_p * COUNT)()
        if not is_its_own:
            blocks.make(table, COUNT, 900)
        with ctxalloc.request(whole=True, limit_bytes=16 * MiB) as request:
            if is_its_own:
                blocks.make(table, COUNT, 900)
                assert request.stats.whole.native_bytes > 4 * MiB, request.stats
            made = sampled_now(request)
            full = bytearray(16 * MiB - request.stats.live_bytes - 4 * KiB)
            before = request.stats
            left = blocks.resize(table, COUNT, 600)
        after = request.stats
        assert left == 0 and after.whole.granted == after.overdraft_bytes == 0, (is_its_own, after)
        assert after.live_bytes <= before.live_bytes, (is_its_own, before, after)
        assert blocks.resize(table, COUNT, 1) == 0
    """,
        preload=preload_before(name),
    )


@pytest.mark.parametrize("name", ["", *PRELOADED])
def test_what_the_allocator_behind_promises_holds_for_samples(name):
    """Mimalloc aligns 96 bytes to 256 and not 256, and has a block of nothing; jemalloc aligns one of nothing, too."""
    check(
        LIBC
        + """
    libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = ctypes.c_void_p, libc.memalign.argtypes
    def outcomes(how):
        return {how() for _ in range(20_000)}

    def aligned(align, size):
        block = libc.aligned_alloc(align, size)
        libc.free(block)
        return block % align

    def nothing(size):
        block = libc.realloc(libc.malloc(size), 0)
        libc.free(block)
        return block is not None

    calls = [(aligned, 256, 96), (aligned, 512, 96), (aligned, 64, 96), (aligned, 512, 0), (nothing, 100)]
    calls += [(nothing, 3000)]
    for call, *arguments in calls:
        without = outcomes(lambda: call(*arguments))
        with ctxalloc.request(whole=True):
            assert outcomes(lambda: call(*arguments)) == without, (call, arguments, without)
        assert call is nothing or without == {0}
    """,
        preload=preload_before(name),
    )


STARTS = """
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
static void *work(void *none) {
    free(malloc(100000));
    munmap(mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1 << 20);
    return none;
}
__attribute__((constructor)) static void start(void) {
    pthread_t thread;
    if (pthread_create(&thread, 0, work, 0) == 0) pthread_join(thread, 0);
}
"""


@needs_compiler
@pytest.mark.parametrize("chosen", ["", "1"])
def test_a_library_may_wait_for_its_threads_as_it_is_opened(chosen, tmp_path):
    """The loader's lock is taken meanwhile, and who asked the loader whose thread that was waited for ever."""
    libraries = [compiled(tmp_path, name, STARTS) for name in ("before", "within", "after")]
    check(
        f"""
    import ctypes, faulthandler
    faulthandler.dump_traceback_later(60, exit=True)
    with ctxalloc.request(whole=True) as request:
        pass
    ctypes.CDLL({libraries[0]!r})
    with ctxalloc.request(whole=True, limit_bytes=16 * MiB):
        ctypes.CDLL({libraries[1]!r})
    ctypes.CDLL({libraries[2]!r})
    """,
        CTXALLOC_WHOLE_MMAP=chosen,
    )


@needs_compiler
def test_a_library_of_another_version_is_an_error(tmp_path):
    other = compiled(tmp_path, "libctxalloc_whole-0", "unsigned ctxalloc_whole_version(void) { return 1; }")
    ended = run("ctxalloc.request(whole=True)", preload=other)
    assert "is of another version of ctxalloc" in ended.stderr


@pytest.mark.parametrize("name", ["/nowhere/libctxalloc_whole-0.so", ""])
def test_a_library_that_is_named_and_not_loaded_is_an_error(name):
    ended = run("ctxalloc.request(whole=True)", preload=name)
    assert ended.returncode == 1
    said = "LD_PRELOAD names its library, but that is not loaded" if name else "its library is not loaded"
    assert said in ended.stderr, ended.stderr


def test_a_variable_that_is_set_after_the_start_is_an_error():
    ended = run('os.environ["LD_PRELOAD"] = "libctxalloc_whole-0.so"; ctxalloc.request(whole=True)', preload="")
    assert "was set after the start" in " ".join(ended.stderr.split()), ended.stderr


def test_tracemalloc_that_was_started_first_is_an_error():
    ended = run("import tracemalloc; tracemalloc.start(); ctxalloc.request(whole=True)")
    assert ended.returncode == 1
    assert "tracemalloc is tracing" in ended.stderr
    assert run("", options=["-X", "tracemalloc"], CTXALLOC_WHOLE="1").returncode == 1


def test_tracemalloc_works_over_it_and_its_tables_are_charged():
    check(
        """
import tracemalloc
ctxalloc._native._whole_enable()
tracemalloc.start()
with ctxalloc.request(whole=True) as request:
    kept = [bytearray(3 * MiB), [str(n) for n in range(100_000)]]
size, peak = tracemalloc.get_traced_memory()
assert 8 * MiB < size < 40 * MiB, size
assert 8 * MiB < request.stats.live_bytes < 60 * MiB, request.stats
del kept
tracemalloc.stop()
settled(lambda: request.stats.live_bytes, 4 * MiB)
with ctxalloc.request(whole=True) as request:
    kept = [str(n) for n in range(100_000)]
assert request.stats.live_bytes > 4 * MiB  # it counts as before
"""
    )


def test_a_limit_is_told_while_tracemalloc_traces():
    """It asks for memory of its own under a lock that it takes for each object: nobody may ask Python what runs."""
    check("""
        import contextlib, faulthandler, tracemalloc
        faulthandler.dump_traceback_later(60, exit=True)
        for traced_inside in (True, False):
            with contextlib.suppress(ctxalloc.BudgetExceeded), ctxalloc.request(whole=True, limit_bytes=4 * MiB) as it:
                if traced_inside:
                    tracemalloc.start(5)
                kept = [str(n) * 3 for n in range(1_000_000)]
                raise AssertionError("it was not told")
            assert it.stats.peak_bytes < 8 * MiB, it.stats
        tracemalloc.stop()
    """)


def test_a_report_tells_places_while_tracemalloc_traces(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import faulthandler, tracemalloc, ctxalloc
faulthandler.dump_traceback_later(60, exit=True)
with ctxalloc.request(whole=True, name="traced"):
    tracemalloc.start(5)
    kept = [str(n) * 3 for n in range(300_000)]
""")
    words = [sys.executable, "-m", "ctxalloc", "run", "--whole", "--report", program]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "program.py:6" in ended.stderr


@pytest.mark.skipif(importlib.util.find_spec("memray") is None, reason="memray")
def test_a_tool_that_takes_its_hooks_away_breaks_nothing_and_is_told():
    check("""
        import memray
        folder = tempfile.mkdtemp()
        with memray.Tracker(f"{folder}/out", trace_python_allocators=True):
            with ctxalloc.request(whole=True) as request:
                kept = [bytearray(MiB), [str(n) for n in range(200_000)], {n: n for n in range(100_000)}]
        kept[1].append("more")
        del kept  # by Python's own allocator, which does not know the placed ones
        settled(lambda: request.stats.live_bytes, MiB)
        try:
            ctxalloc.request(whole=True)
        except RuntimeError as error:
            assert "cannot be had any more" in str(error)
        else:
            raise AssertionError("it counts no objects, and says nothing")
    """)


@pytest.mark.skipif(importlib.util.find_spec("memray") is None, reason="memray")
@pytest.mark.parametrize("options", [[], ["--trace-python-allocators"]], ids=["plain", "python"])
def test_memray_works_over_it(tmp_path, options):
    script = tmp_path / "script.py"
    script.write_text(
        "import gc, json, ctxalloc\n"
        "with ctxalloc.request(whole=True) as request:\n"
        "    kept = [bytearray(5 << 20), [str(n) for n in range(100_000)]]\n"
        "assert 10 << 20 < request.stats.live_bytes < 30 << 20, request.stats\n"
        "try:\n"
        "    with ctxalloc.request(whole=True, limit_bytes=8 << 20):\n"
        "        bytes(20 << 20)\n"
        "except ctxalloc.BudgetExceeded:\n"
        "    print('refused')\n"
    )
    arguments = ["memray", "run", *options, "-q", "-o", str(tmp_path / "out.bin"), str(script)]
    program = f"import runpy\nsys.argv = {arguments!r}\nrunpy.run_module('memray', run_name='__main__')"
    ended = run(program)
    assert (ended.returncode, ended.stdout) == (0, "refused\n"), ended.stdout + ended.stderr
    assert (tmp_path / "out.bin").stat().st_size > 1000
