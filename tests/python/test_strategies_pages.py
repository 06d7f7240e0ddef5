"""Strategies that ask more of the system: guarded, shared, huge, placed and locked pages; and C functions of users."""

import ctypes
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import subprocesses

import ctxalloc
from ctxalloc.strategies import Callbacks, Guard, HugePages, Locked, Numa, SharedMemory

SIZES = (1, 7, 100, 1000, 5000, 70_000, 300_000, 5 * ctxalloc.MiB)


def made(strategy: ctxalloc.strategies.Strategy, fresh_name: Callable[[], str]) -> ctxalloc.Handler:
    return ctxalloc.register(fresh_name(), strategy)


def test_the_names_cost_nothing_before_they_are_used() -> None:
    program = """
import ctxalloc, numpy, pathlib, re
def caught():
    status = pathlib.Path("/proc/self/status").read_text()
    locked = int(re.search(r"VmLck:\\s+(\\d+)", status)[1])
    return int(re.search(r"SigCgt:\\s+(\\w+)", status)[1], 16) >> 10 & 1, locked
assert [ctxalloc.handler(name).name for name in ("guard", "hugepages", "locked")]
print(*caught())
with ctxalloc.use("guard"):
    numpy.ones(10)
print(*caught())
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "0", "1", "0"]


HINTED = """
import pathlib, re, numpy, ctxalloc
def is_hinted(array):
    middle = array.ctypes.data + array.nbytes // 2
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", pathlib.Path("/proc/self/smaps").read_text(), flags=re.M)[1:]:
        first, last = (int(part, 16) for part in entry.split(" ", 1)[0].split("-"))
        if first <= middle < last:
            return "hg" in re.search(r"^VmFlags: (.*)$", entry, re.M)[1].split()
for name in ("default_allocator", "system"):
    with ctxalloc.use(name):
        print(*(is_hinted(make(40 << 20, numpy.uint8)) for make in (numpy.empty, numpy.zeros)))
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a kernel without huge pages")
@pytest.mark.parametrize("setting", ["0", "1"])
def test_the_c_heap_asks_for_huge_pages_as_numpys_default_does(setting: str) -> None:
    lines = subprocesses.says(HINTED, NUMPY_MADVISE_HUGEPAGE=setting).splitlines()
    default, system = (line.split() for line in lines)
    expected = str(setting == "1")
    assert default[0] == expected
    assert system == [expected, expected]


GUARDED = """
import ctypes, numpy as np, os, resource, sys, threading
import ctxalloc
from ctxalloc.strategies import Guard
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def guarded(size, **options):
    with ctxalloc.use(ctxalloc.register("guarded", Guard(**options))):
        return np.ones(size, np.uint8)
"""


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (
            "a = guarded(100, align=1); ctypes.memset(a.ctypes.data, 0, 101)",
            "write 1 byte past the end of a live block of 100 bytes",
        ),
        (
            "a = guarded(100); ctypes.string_at(a.ctypes.data, 129)",
            "read 29 bytes past the end of a live block of 100 bytes",
        ),
        (
            "a = guarded(4096, underrun=True); ctypes.string_at(a.ctypes.data - 1, 1)",
            "read 1 byte before the start of a live block of 4096 bytes",
        ),
        (
            "a = guarded(100); address = a.ctypes.data; del a; ctypes.string_at(address + 5, 1)",
            "read at offset 5 of a freed block of 100 bytes",
        ),
        (
            "a = guarded(80, align=8); np.lib.stride_tricks.as_strided(a, (100,))[:] = 0",
            "write 1 byte past the end of a live block of 80 bytes",
        ),
    ],
)
def test_guard_stops_a_misuse_and_says_whose_memory_it_is(misuse: str, said: str) -> None:
    outcome = subprocesses.run(GUARDED + misuse)
    if os.uname().machine != "x86_64":
        said = re.sub("^(read|write)", "access", said)
    assert f"ctxalloc Guard: {said} at 0x" in outcome.err
    assert "ctxalloc Guard:   allocated by thread" in outcome.err
    assert ("ctxalloc Guard:   freed by thread" in outcome.err) == ("freed" in said)
    # Python's own handler has its turn after ours, and the default action after that.
    assert "Fatal Python error: Segmentation fault" in outcome.err
    assert outcome.code == -11


def test_guard_reports_what_was_overwritten_when_the_array_is_freed(
    capfd: pytest.CaptureFixture[str], fresh_name: Callable[[], str]
) -> None:
    guard = Guard()
    with ctxalloc.use(made(guard, fresh_name)):
        array = np.ones(100, np.uint8)
    assert guard.misuses == 0
    np.lib.stride_tricks.as_strided(array, (103,))[101:] = 0
    assert capfd.readouterr().err == ""
    del array
    assert guard.misuses == 1
    said = capfd.readouterr().err
    assert "overwritten: from 2 to 3 bytes past the end of a live block of 100 bytes" in said
    assert "under Guard { align: 64," in said


def test_a_silent_guard_only_counts(capfd: pytest.CaptureFixture[str], fresh_name: Callable[[], str]) -> None:
    guard = Guard(report=False)
    with ctxalloc.use(made(guard, fresh_name)):
        array = np.ones(100, np.uint8)
    np.lib.stride_tricks.as_strided(array, (101,))[100] = 0
    del array
    assert (guard.misuses, capfd.readouterr().err) == (1, "")


@pytest.fixture
def shared(fresh_name: Callable[[], str]) -> ctxalloc.Handler:
    return made(SharedMemory(), fresh_name)


MAPPING = """
import mmap, numpy as np, sys
fd, offset, size = map(int, sys.argv[1:])
array = np.ndarray((3, 5), np.int64, buffer=mmap.mmap(fd, size), offset=offset, strides=(-80, 8))
print(array.tolist())
array[1, 1] = -7
"""


def test_another_process_maps_an_array_and_both_see_what_either_writes(shared: ctxalloc.Handler) -> None:
    with ctxalloc.use(shared):
        array = np.arange(100, dtype=np.int64).reshape(10, 10)
    view = array[7:4:-1, 2:7]
    fd, offset, size = ctxalloc.shared_memory_of(view)
    assert (offset, size) == (72 * 8, 800)
    done = subprocess.run(
        [sys.executable, "-c", MAPPING, str(fd), str(offset), str(size)],
        check=True,
        capture_output=True,
        text=True,
        pass_fds=[fd],
        timeout=120,
    )
    assert done.stdout.strip() == str([[72, 73, 74, 75, 76], [62, 63, 64, 65, 66], [52, 53, 54, 55, 56]])
    assert view[1, 1] == array[6, 3] == -7


def test_a_descriptor_travels_over_a_socket_and_outlives_the_array(shared: ctxalloc.Handler) -> None:
    with ctxalloc.use(shared):
        array = np.full(5000, 42)
    here, there = socket.socketpair()
    with here, there:
        found = ctxalloc.shared_memory_of(array)
        assert found == (found.fd, 0, array.nbytes)
        socket.send_fds(here, [b"array"], [found.fd])
        _, (received,), *_ = socket.recv_fds(there, 5, 1)
    del array
    with mmap.mmap(received, found.size) as pages:
        os.close(received)
        assert bytes(pages[:8]) == (42).to_bytes(8, sys.byteorder)
        assert len(pages) == found.size


def test_what_is_not_in_shared_memory_says_where_it_is(shared: ctxalloc.Handler) -> None:
    with pytest.raises(ValueError, match=r"memory of handler 'default_allocator'.*strategies\.SharedMemory"):
        ctxalloc.shared_memory_of(np.ones(10))
    with pytest.raises(ValueError, match="memory of no handler"):
        ctxalloc.shared_memory_of(np.frombuffer(b"12345678"))
    with pytest.raises(TypeError, match="got 'list'"):
        ctxalloc.shared_memory_of([1, 2])  # type: ignore[arg-type]
    with ctxalloc.use(shared):
        array = np.ones(10)
    address = array.ctypes.data
    assert ctxalloc._native.shared_memory_at(address) is not None
    del array
    assert ctxalloc._native.shared_memory_at(address) is None


def test_an_array_that_grows_takes_little_more_memory_than_it_has() -> None:
    program = """
import numpy as np, ctxalloc
from resident import highest_rss
before = highest_rss()
with ctxalloc.use("pool"):
    array = np.ones(ctxalloc.MiB, np.uint8)
    for mib in range(2, 97):
        array.resize(mib * ctxalloc.MiB, refcheck=False)
        array[-ctxalloc.MiB :] = mib
assert all(array[n * ctxalloc.MiB] == n + 1 for n in range(96))
print((highest_rss() - before) // ctxalloc.MiB)
"""
    assert int(subprocesses.says(program)) < 96 * 5 / 4


def test_no_room_to_grow_is_mapped_where_all_that_is_mapped_is_locked() -> None:
    program = """
import ctypes, numpy as np, sys, ctxalloc
from resident import highest_rss
MCL_FUTURE = 2
if ctypes.CDLL(None).mlockall(MCL_FUTURE):
    sys.exit("refused")
before = highest_rss()
with ctxalloc.use("pool"):
    array = np.ones(16 * ctxalloc.MiB, np.uint8)
    array.resize(48 * ctxalloc.MiB, refcheck=False)
print((highest_rss() - before) // ctxalloc.MiB)
"""
    outcome = subprocesses.run(program)
    if outcome.err == "refused\n":
        pytest.skip("this process may not lock what it will map (ulimit -l)")
    assert outcome.err == ""
    assert int(outcome.out) < 16 + 48 + 16  # with as much again behind it they are 112


def test_reserved_huge_pages_are_there_or_refused_with_their_number() -> None:
    reserved = int(Path("/proc/sys/vm/nr_hugepages").read_text())
    if reserved == 0:
        with pytest.raises(RuntimeError, match=r"nr_hugepages is 0, of which 0 are free; reserve some as root"):
            HugePages(reserved=True)
    else:
        assert repr(HugePages(reserved=True)) == "Pool(source=HugePages(reserved=True))"


def test_a_limit_without_room_is_explained() -> None:
    program = """
import os, resource, numpy as np, ctxalloc
from ctxalloc.strategies import Locked
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.getuid() == 0:
    os.setuid(65534)
try:
    Locked()
except RuntimeError as refused:
    print(refused)
with ctxalloc.use("locked"):
    try:
        np.ones(10)
    except MemoryError:
        print("MemoryError")
"""
    refused, later = subprocesses.says(program).splitlines()
    assert refused.startswith("cannot lock 65536 bytes of memory: RLIMIT_MEMLOCK is 0 bytes")
    assert "ulimit -l" in refused
    assert later == "MemoryError"


class Heap:
    """A user's allocator in Python: libc, and a book of sizes that `free` is held to."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        address, size = ctypes.c_void_p, ctypes.c_size_t
        libc.malloc.restype = libc.calloc.restype = libc.realloc.restype = address
        libc.malloc.argtypes, libc.free.argtypes = [size], [address]
        libc.calloc.argtypes, libc.realloc.argtypes = [size, size], [address, size]
        self.sizes: dict[int, int] = {}
        self.wrong: list[tuple[int, int]] = []
        self.contexts: set[int | None] = set()
        self.refuses = False

        def enter(ctx: int | None, block: int | None, size: int) -> int | None:
            self.contexts.add(ctx)
            if block is not None:
                self.sizes[block] = size
            return block

        def malloc(ctx: int | None, size: int) -> int | None:
            return None if self.refuses else enter(ctx, libc.malloc(size), size)

        def calloc(ctx: int | None, nelem: int, elsize: int) -> int | None:
            return enter(ctx, libc.calloc(nelem, elsize), nelem * elsize)

        def realloc(ctx: int | None, block: int, size: int) -> int | None:
            del self.sizes[block]
            return enter(ctx, libc.realloc(block, size), size)

        def free(ctx: int | None, block: int, size: int) -> None:
            self.contexts.add(ctx)
            if self.sizes.pop(block) != size:
                self.wrong.append((block, size))
            libc.free(block)

        self.malloc = ctypes.CFUNCTYPE(address, address, size)(malloc)
        self.calloc = ctypes.CFUNCTYPE(address, address, size, size)(calloc)
        self.realloc = ctypes.CFUNCTYPE(address, address, address, size)(realloc)
        self.free = ctypes.CFUNCTYPE(None, address, address, size)(free)


def test_callbacks_serve_arrays_and_free_gets_the_true_size(fresh_name: Callable[[], str]) -> None:
    heap = Heap()
    strategy = Callbacks(
        malloc=heap.malloc, calloc=heap.calloc, realloc=heap.realloc, free=heap.free, ctx=1234, align=16
    )
    handler = made(strategy, fresh_name)
    assert (handler.alignment, repr(strategy)) == (16, "Callbacks(align=16)")
    with ctxalloc.use(handler):
        arrays = [np.full(size, size % 100, np.uint8) for size in SIZES]
        zeros = np.zeros(1000)
        arrays[2].resize(200_000, refcheck=False)
        empty = np.fromstring("", sep=" ")  # NumPy frees it with another size than it was made with
        np.argsort(np.arange(100)[::-1])
    assert not zeros.any()
    assert [array[0] for array in arrays] == [size % 100 for size in SIZES]
    assert len(heap.sizes) == len(SIZES) + 2
    heap.refuses = True
    with ctxalloc.use(handler), pytest.raises(MemoryError):
        np.empty(1000)
    del arrays, zeros, empty
    assert (heap.sizes, heap.wrong, heap.contexts) == ({}, [], {1234})


def test_callbacks_of_python_run_while_an_exception_waits(fresh_name: Callable[[], str]) -> None:
    """NumPy frees what it began before it raises; code that runs meanwhile takes that exception for its own."""
    heap, lock = Heap(), threading.Lock()

    def free(ctx: int | None, block: int, size: int) -> None:
        with lock:
            heap.free(ctx, block, size)

    handler = made(
        Callbacks(malloc=heap.malloc, calloc=heap.calloc, realloc=heap.realloc, free=type(heap.free)(free)), fresh_name
    )
    with ctxalloc.use(handler):
        with pytest.raises(ValueError, match="could not convert string to float: 'x'"):
            np.array([1.0, 2.0, "x"], dtype=float)
        with pytest.raises(ZeroDivisionError):
            np.fromiter((1 / (3 - number) for number in range(9)), float)
    assert (heap.sizes, heap.wrong, lock.locked()) == ({}, [], False)


def test_arrays_of_python_callbacks_may_be_alive_when_python_exits() -> None:
    program = """
import sys; sys.path.insert(0, FOLDER)
import ctxalloc, numpy as np, test_strategies_pages as tests
heap = tests.Heap()
functions = dict(malloc=heap.malloc, calloc=heap.calloc, realloc=heap.realloc, free=heap.free)
with ctxalloc.use(ctxalloc.register("mine", ctxalloc.strategies.Callbacks(**functions))):
    sys.kept = np.kept = kept = [np.ones(1000), np.zeros(10)]
    kept.append(kept)
print(len(heap.sizes))
"""
    assert subprocesses.says(program.replace("FOLDER", repr(str(Path(__file__).parent)))) == "2"


def test_callbacks_are_addresses_ctypes_functions_or_numba_functions() -> None:
    heap = Heap()

    class Compiled:
        """As numba's cfunc."""

        address = ctypes.cast(heap.calloc, ctypes.c_void_p).value

    address = ctypes.cast(heap.malloc, ctypes.c_void_p).value
    assert address is not None
    made_of_all = Callbacks(malloc=address, calloc=Compiled(), realloc=heap.realloc, free=heap.free)  # type: ignore[arg-type]
    assert repr(made_of_all) == "Callbacks(align=1)"


@pytest.mark.parametrize("missing", ["malloc", "calloc", "realloc", "free"])
@pytest.mark.parametrize("nothing", [None, 0])
def test_a_missing_callback_is_named(missing: str, nothing: int | None) -> None:
    functions: dict[str, int | None] = dict.fromkeys(["malloc", "calloc", "realloc", "free"], 4096)
    functions[missing] = nothing
    with pytest.raises(ctxalloc.RegistrationError, match=f"'Callbacks' has no {missing} function"):
        Callbacks(**functions)


@pytest.mark.parametrize(
    ("construct", "error", "message"),
    [
        (lambda: Guard(align=3), ValueError, "align=3 is not possible; give a power of two from 1 to 4096"),
        (lambda: Guard(align=8192), ValueError, "align=8192"),
        (lambda: Guard(underrun=1), TypeError, "underrun=1"),  # type: ignore[arg-type]
        (lambda: Guard(quarantine_bytes=-1), ValueError, "quarantine_bytes=-1"),
        (lambda: HugePages(reserved="yes"), TypeError, "reserved='yes'"),  # type: ignore[arg-type]
        (lambda: HugePages(warm_bytes=-1), ValueError, "warm_bytes=-1"),
        (lambda: Numa(node=1023), ValueError, "node=1023 is not possible; the nodes of this machine are 0"),
        (lambda: Numa(node=-1), ValueError, "node=-1"),
        (lambda: Numa(node="0"), TypeError, "node='0'"),  # type: ignore[arg-type]
        (lambda: Numa(), ValueError, "one node or more"),
        (lambda: Numa(node=[0, 0], policy="preferred"), ValueError, "exactly one node"),
        (lambda: Numa(node=0, policy="close"), ValueError, "policy='close'"),  # type: ignore[arg-type]
        (lambda: Locked(decay_seconds=-1), ValueError, "decay_seconds=-1"),
        (lambda: Callbacks(malloc="m", calloc=1, realloc=1, free=1), TypeError, "malloc='m'"),  # type: ignore[arg-type]
        (lambda: Callbacks(malloc=1, calloc=1, realloc=1, free=-1), ValueError, "free=-1"),
        (lambda: Callbacks(malloc=1, calloc=1, realloc=1, free=1, align=3), ValueError, "align=3"),
    ],
)
def test_nonsense_is_refused_with_the_value(
    construct: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        construct()
    assert message in str(caught.value)
