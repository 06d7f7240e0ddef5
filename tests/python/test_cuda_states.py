"""`ctxalloc.cuda` where something is missing or goes: no driver, no device, fork, exit. Each in a process."""

import ctypes.util
import sys
from pathlib import Path

import pytest
from fake_cuda import library
from subprocesses import run, says

pytestmark = pytest.mark.any_numpy

BEGIN = """
import numpy as np, os, ctxalloc
from ctxalloc import cuda, MiB
from fake_cuda import fake
driver = fake()
"""


def with_driver(program: str, *, macros: tuple[str, ...] = (), **numbers: int) -> str:
    """What a program prints on the tests' driver."""
    fake = ",".join(f"{name}={value}" for name, value in numbers.items())
    return says(BEGIN + program, CTXALLOC_FAKE_LIBRARY=library(*macros), CTXALLOC_FAKE_CUDA=fake)


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver")
def test_without_a_driver_the_error_says_what_to_install() -> None:
    program = """
import ctxalloc
from ctxalloc import cuda
for ask in (cuda.use, lambda: ctxalloc.use("cuda_host"), lambda: ctxalloc.handler("cuda_managed"), cuda.Pool,
            cuda.Arena, lambda: cuda.kind_of(1), cuda.device, lambda: cuda.keep(b"1", stream=1)):
    try:
        ask()
    except RuntimeError as error:
        said = str(error)
        assert "could not be loaded from libcuda.so.1" in said and "install the NVIDIA driver" in said, said
    else:
        raise AssertionError(ask)
assert not cuda.is_available() and cuda.settle() == 0
with cuda.capturing():
    pass
print(cuda.info()["state"], cuda.info()["devices"])
try:
    ctxalloc.use("cuda_other")
except ctxalloc.UnknownHandlerError:
    print("unknown")
"""
    assert says(program) == "no driver []\nunknown"


@pytest.mark.parametrize(
    ("code", "state", "name", "advice"),
    [
        (34, "stub library", "CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"),
        (100, "no device", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        (803, "driver mismatch", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
        (999, "failed", "CUDA_ERROR_UNKNOWN", "dmesg"),
        (12345, "failed", "not known here", "documentation"),
    ],
)
def test_each_state_without_a_device_has_an_error_of_its_own(code: int, state: str, name: str, advice: str) -> None:
    program = f"""
import os, ctypes
from ctxalloc import _native, cuda
try:
    _native.cuda_load({library()!r})
except RuntimeError as error:
    print(error)
"""
    said = says(program, CTXALLOC_FAKE_CUDA=f"init={code}")
    assert f"cuInit returned {name}" in said or (name == "not known here" and name in said)
    assert f"({code})" in said
    assert advice in said
    # The same by the name that the system finds.
    folder = library().rsplit("/", 1)[0]
    asked = "from ctxalloc import cuda; info = cuda.info(); print(info['state'], '|', info['error'])"
    shown = says(asked, CTXALLOC_FAKE_CUDA=f"init={code}", LD_LIBRARY_PATH=folder)
    assert shown == f"{state} | {said}"


def test_no_device_at_all_is_that_state_too() -> None:
    folder = library().rsplit("/", 1)[0]
    asked = "from ctxalloc import cuda; print(cuda.info()['state'])"
    assert says(asked, CTXALLOC_FAKE_CUDA="devices=0", LD_LIBRARY_PATH=folder) == "no device"


def test_a_library_without_a_function_is_told_by_its_name() -> None:
    folder = library("WITHOUT_MANAGED").rsplit("/", 1)[0]
    asked = "from ctxalloc import cuda; info = cuda.info(); print(info['state'], '|', info['error'])"
    shown = says(asked, LD_LIBRARY_PATH=folder)
    assert shown.startswith("driver too old | ")
    assert "libcuda.so.1 has no function cuMemAllocManaged" in shown
    assert "install a newer one" in shown


def test_the_driver_s_own_error_is_told_of_an_address() -> None:
    program = """
with cuda.use():
    array = np.ones(10)
def said(**numbers):
    driver.set(**numbers)
    for ask in (cuda.kind_of, cuda.as_cuda):
        try:
            ask(array)
        except RuntimeError as error:
            print(str(error).split(": ")[1].split(";")[0])
        else:
            print("no error")
    driver.set(**{name: 0 for name in numbers})
said(attribute_fails=999)
said(pointer_fails=2)
assert cuda.kind_of(array) == "host"
"""
    assert with_driver(program).splitlines() == [
        "cuPointerGetAttribute returned CUDA_ERROR_UNKNOWN (999)",
        "cuPointerGetAttribute returned CUDA_ERROR_UNKNOWN (999)",
        "no error",
        "cuMemHostGetDevicePointer returned CUDA_ERROR_OUT_OF_MEMORY (2)",
    ]


def test_handlers_of_other_devices_are_found_by_name() -> None:
    program = """
assert ctxalloc.handler("cuda_host:1") is cuda.handler(device=1)
with ctxalloc.use("cuda_managed:1"):
    np.ones(10)
for wrong in ("cuda_host:0", "cuda_host:01", "cuda_host:", "cuda_host:x", "cuda_other:1"):
    try:
        ctxalloc.handler(wrong)
    except ctxalloc.UnknownHandlerError:
        pass
    else:
        raise AssertionError(wrong)
try:
    ctxalloc.use("cuda_host:7")
except RuntimeError as error:
    print("no CUDA device 7; there are 2" in str(error))
"""
    assert with_driver(program, devices=2) == "True"


def test_a_driver_before_12_5_needs_the_users_word() -> None:
    program = """
assert not cuda.info()["safe_reuse"]
for ask in (cuda.use, cuda.Pool, lambda: cuda.Arena(kind="managed"), lambda: ctxalloc.use("cuda_host")):
    try:
        ask()
    except RuntimeError as error:
        assert "version 12.4" in str(error) and "cuCtxRecordEvent" in str(error), error
        assert "reuse='unsafe'" in str(error) and "keep(" in str(error), error
    else:
        raise AssertionError(ask)
driver.set(progress=0)
with ctxalloc.use(ctxalloc.register("by my word", cuda.Pool(reuse="unsafe"))):
    array = np.ones(1000)
    assert cuda.kind_of(array) == "host"
    driver.copy(array)
    cuda.keep(array, stream=1)
    del array
    others = [np.zeros(1000) for _ in range(10)]
driver.run()
print(cuda.info()["kept"])
"""
    assert with_driver(program, macros=("BEFORE_12_5",), version=12040) == "0"


def test_the_context_is_made_when_memory_is() -> None:
    program = """
scope = cuda.use()
pool, arena = cuda.Pool(kind="managed"), cuda.Arena()
cuda.info(), cuda.device()
assert driver.get("contexts") == 0
with scope:
    np.ones(10)
print(driver.get("contexts"), driver.get("registrations"))
"""
    assert with_driver(program) == "1 1"


def test_all_devices_are_asked_before_a_block_is_reused() -> None:
    program = """
driver.set(progress=0)
with cuda.use():
    np.ones(10)
with cuda.use(device=1):
    other = np.ones(10)
assert ctxalloc.handler_of(other).name == "cuda_host:1"
before = driver.get("recorded")
with cuda.use():
    np.ones(4 * MiB, np.uint8)
print(driver.get("recorded") - before, driver.get("contexts"))
driver.run()
assert cuda.settle() >= 4 * MiB
"""
    assert with_driver(program, devices=3) == "2 2"


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_child_of_fork_calls_no_driver() -> None:
    program = """
driver.set(progress=0)
with cuda.use():
    inherited, waiting = np.full(1000, 5), np.ones(2 * MiB, np.uint8)
    driver.copy(waiting)
    del waiting
    with cuda.use("managed"):
        managed = np.ones(10)
    pid = os.fork()
    if pid == 0:
        assert (inherited == 5).all()
        inherited[:] = 6
        more = [np.full(size, 7, np.uint8) for size in (100, 5 * MiB, 60 * MiB)]
        assert all((array == 7).all() for array in more)
        del inherited, more
        big = np.zeros(64 * MiB, np.uint8)
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
        try:
            cuda.keep(big, stream=1)
        except RuntimeError as error:
            assert "'spawn'" in str(error), error
        assert cuda.info()["state"] == "forked" and cuda.settle() == 0
        del managed, big
        ctxalloc.trim()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (inherited == 5).all()
driver.run()
print(cuda.settle() >= 2 * MiB)
"""
    assert with_driver(program) == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("refused", [0, -1])
def test_a_child_of_fork_maps_nothing_where_the_driver_s_memory_was(refused: int) -> None:
    # The child does not have that memory, and pools go by addresses: one that is used twice mixes up two pools.
    program = """
import signal
with cuda.use():
    first = np.ones(1000)
driver.set(refuse_register=REFUSED)
with cuda.use("managed" if REFUSED == 0 else "host"):
    gone = [np.ones(10), *(np.ones(size * MiB, np.uint8) for size in (2, 7, 70))]
def places(arrays):
    return {place >> 12 for array in arrays for place in range(address(array), address(array) + array.nbytes, 4096)}
def address(array):
    return array.__array_interface__["data"][0]
plain = ctxalloc.register("plain pool", ctxalloc.strategies.Pool())
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    try:
        with ctxalloc.use(plain):
            more = [np.full(size * MiB, 7, np.uint8) for size in (*[3] * 30, 60, 70, 5, 6, 7, 8, 9, 10)]
        if not places(gone) & places(more):
            gone.clear()
            ctxalloc.trim()
            os._exit(7 if all((array == 7).all() for array in more) else 8)
    finally:
        os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert with_driver(program.replace("REFUSED", str(refused))) == "7"


def test_an_exit_frees_nothing_that_is_alive_and_calls_nobody() -> None:
    program = """
import atexit, gc
driver.set(progress=0)
with cuda.use():
    kept = [np.ones(n, np.uint8) for n in (100, 3 * MiB)]
    gone = np.ones(2 * MiB, np.uint8)
    driver.copy(gone)
    del gone
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
    assert with_driver(program) == "ended"


def test_a_driver_that_died_gives_errors_and_loses_nothing() -> None:
    program = """
with cuda.use():
    array = np.ones(100)
    big = [np.ones(100_000) for _ in range(20)]
    driver.set(dead=700)
    live = np.ones(100)  # of memory that is there
    for size in (30 * MiB, 64 * MiB):
        try:
            np.ones(size)
        except MemoryError:
            pass
        else:
            raise AssertionError(size)
    before = cuda.info()["mapped_bytes"]
    del big, array, live
ctxalloc.trim()
info = cuda.info()
assert info["mapped_bytes"] == before, "nothing was unmapped, and nothing counted twice"
assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in info["last_failure"], info
assert info["waiting_bytes"] > 0 and cuda.settle() == 0
try:
    cuda.keep(b"1", stream=1)
except RuntimeError as error:
    print("700" in str(error))
assert info["state"] == "context lost" and "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in info["error"], info
assert not cuda.is_available() and info["devices"] == []
"""
    assert with_driver(program) == "True"


def test_blocks_whose_event_fails_are_never_handed_out_again() -> None:
    program = """
with cuda.use():
    array = np.ones(2 * MiB, np.uint8)
    place = array.__array_interface__["data"][0]
    driver.set(query_fails=719)
    del array
    others = [np.ones(2 * MiB, np.uint8) for _ in range(4)]
    driver.set(query_fails=0)
    others += [np.ones(2 * MiB, np.uint8) for _ in range(4)]
assert place not in {other.__array_interface__["data"][0] for other in others}
print(cuda.info()["stuck_bytes"] // MiB == 2, "CUDA_ERROR_LAUNCH_FAILED" in cuda.info()["last_failure"])
"""
    assert with_driver(program) == "True True"


def test_a_refused_registration_is_an_error_only_if_nothing_else_helps() -> None:
    program = """
driver.set(refuse_register=2)
arrays = []
with cuda.use():
    for size in (10, 9 * MiB, 90 * MiB):
        arrays.append(np.zeros(size, np.uint8))
        assert cuda.kind_of(arrays[-1]) == "host" and not arrays[-1].any()
    assert cuda.info()["refused_registrations"] == 1 and driver.get("allocations") == 1
    driver.set(refuse_register=-1, refuse_alloc=-1)
    try:
        np.zeros(200 * MiB, np.uint8)
    except MemoryError:
        print("refused")
assert "CUDA_ERROR_OUT_OF_MEMORY" in cuda.info()["last_failure"]
"""
    assert with_driver(program) == "refused"


def test_memory_that_cannot_be_registered_is_refused_at_once() -> None:
    program = """
for ask in (cuda.use, lambda: cuda.use("managed")):
    try:
        ask()
    except RuntimeError as error:
        print(str(error).split(":")[0])
"""
    assert with_driver(program, register=0, concurrent=0).splitlines() == [
        "memory of the host cannot be registered for CUDA device 0 ('Fake 0')",
        "CUDA device 0 ('Fake 0') has no managed memory that host and device may use at the same time",
    ]


def test_the_command_says_how_it_stands() -> None:
    outcome = run(
        "import runpy, sys; sys.argv[1:] = ['info']; runpy.run_module('ctxalloc', run_name='__main__')",
        LD_LIBRARY_PATH=library().rsplit("/", 1)[0],
    )
    assert outcome.code == 0, outcome
    assert "12.5, 1 device: Fake 0" in outcome.out


def test_the_python_in_the_guide_prints_what_it_says() -> None:
    here = Path(__file__).parent
    program = f"import runpy, sys; sys.argv[1:] = [{str(here.parent.parent / 'docs' / 'cuda.md')!r}]\n"
    program += f"runpy.run_path({str(here / 'documents.py')!r}, run_name='__main__')"
    says(program, LD_LIBRARY_PATH=library().rsplit("/", 1)[0])


def test_the_bench_says_that_it_needs_a_device() -> None:
    bench = Path(__file__).parents[2] / "benches" / "pinned.py"
    outcome = run(
        f"import runpy; runpy.run_path({str(bench)!r}, run_name='__main__')",
        LD_LIBRARY_PATH=library().rsplit("/", 1)[0],
        CTXALLOC_FAKE_CUDA="init=100",
    )
    assert outcome.code == 1
    assert "bench-cuda needs a CUDA device" in outcome.err
    assert "CUDA_ERROR_NO_DEVICE" in outcome.err
