"""A process on a real device that forks, ends, crashes, or has no device. Each in a process of its own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from subprocesses import run, says

from ctxalloc import cuda

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 60  # a program hangs
BEGIN = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import gc, os, threading
import numpy as np, ctxalloc
from ctxalloc import cuda, MiB, GiB
from on_device import Device, address
"""


def with_device(program: str) -> str:
    """What a program prints that has a device."""
    return says(BEGIN + program, timeout_seconds=TIMEOUT_SECONDS)


def test_the_context_is_made_when_memory_is() -> None:
    program = """
import ctypes
device = Device.__new__(Device)
device._c = ctypes.CDLL("libcuda.so.1")
scope = cuda.use()
pool, arena = cuda.Pool(kind="managed"), cuda.Arena()
cuda.info(), cuda.device()
before = device.has_context()
with scope:
    np.ones(10)
print(before, device.has_context())
"""
    assert with_device(program) == "False True"


def test_a_child_of_fork_goes_on_in_plain_pages() -> None:
    program = """
import signal, traceback, warnings
warnings.simplefilter("ignore")  # CPython's, of threads: the driver has some
device = Device()
stream, place = device.stream(), device.allocate(2 * MiB)

def child():
    assert (inherited == 5).all()
    inherited[:] = 6
    with cuda.use():
        more = [np.full(size, 7, np.uint8) for size in (100, 5 * MiB, 60 * MiB)]
        big = np.zeros(64 * MiB, np.uint8)
    assert all((array == 7).all() for array in more)
    assert not big.any() and cuda.kind_of(big) == "pageable"
    with ctxalloc.request(strategy=None):
        np.ones(10)
    try:
        with cuda.use("managed"):
            np.ones(1000)
    except MemoryError:
        pass
    else:
        raise AssertionError("managed memory in a child")
    for ask in (lambda: cuda.keep(big, stream=1), cuda.Pool, cuda.Arena, lambda: cuda.use(device=1)):
        try:
            ask()
        except RuntimeError as error:
            assert "'spawn'" in str(error), error
        else:
            raise AssertionError(ask)
    assert cuda.info()["state"] == "forked" and cuda.settle() == 0
    del more, big
    managed.clear()
    ctxalloc.trim()

with cuda.use():
    inherited, waiting = np.full(1000, 5), np.ones(2 * MiB, np.uint8)
with cuda.use("managed"):
    managed = [np.ones(10)]
gate = device.gate(stream)
device.to_device(place, waiting, stream)
del waiting
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    try:
        child()
        os._exit(7)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert (inherited == 5).all()
gate.open()
device.wait()
assert (device.bytes_at(place, 2 * MiB) == 1).all()
print(cuda.settle() >= 2 * MiB)
"""
    assert with_device(program) == "True"


def test_a_child_of_fork_ends_as_any_process() -> None:
    program = """
import signal, warnings
warnings.simplefilter("ignore")
with cuda.use():
    kept = [np.ones(n, np.uint8) for n in (100, 3 * MiB)]
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert with_device(program) == "7"


def test_workers_that_are_spawned_have_a_device_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(
        "import numpy as np\nfrom ctxalloc import cuda\n"
        "def work(number):\n"
        "    with cuda.use():\n"
        "        return str(cuda.kind_of(np.full(1000, number)))\n"
    )
    program = f"""
sys.path.insert(0, {str(tmp_path)!r})
import multiprocessing
from spawned import work
if __name__ == "__main__":
    assert work(0) == "host"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(work, range(2)))
"""
    assert with_device(program) == "['host', 'host']"


def test_an_exit_with_live_blocks_and_running_copies_is_quiet() -> None:
    program = """
device = Device()
stream, place = device.stream(), device.allocate(3 * MiB)
with cuda.use():
    kept = [np.ones(n, np.uint8) for n in (100, 3 * MiB)]
    gone = np.ones(2 * MiB, np.uint8)
    device.gate(stream, seconds=0.5)
    device.to_device(place, gone, stream)
    device.to_device(place, kept[1], stream)
    cuda.keep(kept[0], stream=stream)
    del gone
with cuda.use("managed"):
    kept.append(np.ones(3 * MiB, np.uint8))
cycle = [np.ones(3)]
cycle.append(cycle)
class Late:
    def __del__(self, np=np, scope=cuda.use()):
        kept.clear()
        with scope:
            np.ones(1000)
late = Late()
print("ended")
"""
    assert with_device(program) == "ended"


def test_threads_that_still_allocate_do_not_disturb_an_exit() -> None:
    program = """
device = Device()
place = device.allocate(3 * MiB)
def work():
    device.enter()
    stream = device.stream()
    with cuda.use():
        while True:
            array = np.ones(2 * MiB, np.uint8)
            device.to_device(place, array, stream)
            del array
            began.set()
for _ in range(3):
    began = threading.Event()
    threading.Thread(target=work, daemon=True).start()
    began.wait()
print("ended")
"""
    outcome = run(BEGIN + program, timeout_seconds=TIMEOUT_SECONDS)
    assert outcome.code == 0, outcome
    assert outcome.out.strip() == "ended"


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_an_exit_after_a_library_was_used_is_quiet(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"there is no {name}")
    program = f"""
import warnings
warnings.simplefilter("ignore")
import {name} as library
with cuda.use():
    array = np.ones(2 * MiB, np.uint8)
there = library.from_numpy(array).to("cuda", non_blocking=True) if {name == "torch"} else library.asarray(array)
del array
with cuda.use():
    other = np.ones(2 * MiB, np.uint8)
print("ended")
"""
    assert with_device(program) == "ended"


def test_a_kernel_that_crashes_leaves_errors_and_no_reuse() -> None:
    program = """
device = Device()
stream, place = device.stream(), device.allocate(2 * MiB)
with cuda.use():
    live, array = np.ones(100), np.ones(2 * MiB, np.uint8)
    where = address(array)
    gate = device.gate(stream)
    device.launch("crash", stream)
    device.to_device(place, array, stream)
    del array
    gate.open()
    try:
        device.wait()
    except Exception as error:
        assert error.code in (700, 719), error
    others = []
    for size in (2 * MiB, 30 * MiB, 64 * MiB):
        try:
            others.append(np.ones(size, np.uint8))
        except MemoryError:
            pass
    assert where not in map(address, others)
info = cuda.info()
assert info["state"] == "context lost" and not cuda.is_available() and info["devices"] == [], info
assert "CUDA_ERROR_" in info["error"] and "the context is lost" in info["error"], info
try:
    cuda.keep(b"1", stream=1)
except RuntimeError as error:
    assert "context is lost" in str(error), error
else:
    raise AssertionError("keep")
assert (live == 1).all()
del live, others
ctxalloc.trim()
print(cuda.info()["stuck_bytes"] >= 2 * MiB)
"""
    assert with_device(program) == "True"


def test_a_hidden_device_is_the_state_no_device() -> None:
    program = """
from ctxalloc import cuda
info = cuda.info()
print(info["state"])
assert "CUDA_VISIBLE_DEVICES" in info["error"] and "CUDA_ERROR_NO_DEVICE (100)" in info["error"], info
try:
    cuda.use()
except RuntimeError as error:
    assert str(error) == info["error"], error
else:
    raise AssertionError("a scope without a device")
"""
    assert says(program, timeout_seconds=TIMEOUT_SECONDS, CUDA_VISIBLE_DEVICES="-1") == "no device"


def test_no_room_for_addresses_is_a_memory_error() -> None:
    program = """
import resource
with cuda.use():
    first = np.ones(MiB, np.uint8)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 512 * MiB, resource.RLIM_INFINITY))
    kept = []
    try:
        while len(kept) < 40:
            kept.append(np.ones(64 * MiB, np.uint8))
    except MemoryError:
        print("refused")
    del kept
    assert np.ones(MiB, np.uint8).all() and first.all()
"""
    assert with_device(program) == "refused"


def test_the_command_says_how_it_stands() -> None:
    done = subprocess.run([sys.executable, "-m", "ctxalloc", "info"], capture_output=True, text=True, check=True)
    assert cuda.device()["name"] in done.stdout


def test_the_python_in_the_guide_prints_what_it_says() -> None:
    program = f"import runpy, sys; sys.argv[1:] = [{str(ROOT / 'docs' / 'cuda.md')!r}]\n"
    program += f"runpy.run_path({str(ROOT / 'tests' / 'python' / 'documents.py')!r}, run_name='__main__')"
    says(program, timeout_seconds=TIMEOUT_SECONDS)
