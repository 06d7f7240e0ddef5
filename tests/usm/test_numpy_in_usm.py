"""NumPy's arrays under handlers over USM: where they live, which queue, what is refused."""

import asyncio
import subprocess
import sys
import threading
import weakref

import dpctl
import numpy as np
import pytest

import ctxalloc
from ctxalloc import usm


@pytest.mark.parametrize("name", ["usm_shared", "usm_host"])
@pytest.mark.parametrize("size_bytes", [1, 100, 5000, 300_000, 20 << 20])
def test_an_array_lives_in_usm_of_its_handlers_kind(name: str, size_bytes: int) -> None:
    with ctxalloc.use(name):
        arrays = [np.empty(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)]
    for array in arrays:
        assert ctxalloc.handler_of(array) is ctxalloc.handler(name)
        assert usm.kind_of(array) == name.removeprefix("usm_")
        array[:] = 7
        assert array.sum() == 7 * size_bytes
    assert usm.kind_of(np.empty(size_bytes, np.uint8)) is usm.UsmKind.UNKNOWN


def test_zeros_are_zero_where_something_lay_before() -> None:
    with usm.use(kind="host"):
        for size in (10, 10_000, 1 << 20, 5 << 20):
            np.full(size, 7, np.uint8)
            assert not np.zeros(size, np.uint8).any()


def test_resizing_keeps_the_elements() -> None:
    with usm.use():
        array = np.arange(100)
    array.resize(1_000_000, refcheck=False)
    assert (array[:100] == np.arange(100)).all()
    assert not array[100:].any()
    assert usm.kind_of(array) is usm.UsmKind.SHARED


def test_a_device_cannot_serve_numpy_and_it_is_said_why() -> None:
    device = usm.handler(kind="device")
    for select in (ctxalloc.use, ctxalloc.set_handler):
        for subject in (device, "usm_device"):
            with pytest.raises(ValueError, match="which the host cannot read or write"):
                select(subject)
    with pytest.raises(ValueError, match="which the host cannot read or write"):
        usm.use(kind="device")
    with pytest.raises(RuntimeError, match="'device' cannot be read by the host"):
        usm.Pool(kind="device")


def test_numpy_itself_gets_no_memory_from_a_device() -> None:
    program = """if True:
        import ctypes, numpy as np, ctxalloc
        from ctxalloc import usm
        api = np._core._multiarray_umath._ARRAY_API if hasattr(np, "_core") else np.core._multiarray_umath._ARRAY_API
        ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
        ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        table = ctypes.cast(ctypes.pythonapi.PyCapsule_GetPointer(api, None), ctypes.POINTER(ctypes.c_void_p))
        select = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[304])
        old = select(usm.handler(kind="device").capsule)
        for make in (np.empty, np.zeros, np.ones):
            try:
                make(1000)
            except MemoryError:
                pass
            else:
                raise SystemExit(1)
        select(old)
        np.ones(1000)
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_queue_may_be_chosen() -> None:
    queue = dpctl.SyclQueue(property="in_order")
    with usm.use(queue=queue, kind="host") as handler:
        array = np.ones(10)
    assert handler is ctxalloc.handler("usm_host"), "the queue is of the same context and device as the default one"
    assert usm.export(array).sycl_queue != queue
    assert usm.export(array, queue=queue).sycl_queue == queue
    device = dpctl.SyclDevice()
    apart = dpctl.SyclQueue(dpctl.SyclContext([device, *device.create_sub_devices(partition=1)]), device)
    with usm.use(queue=apart, kind="host") as handler:
        array = np.ones(10)
    assert handler.name.startswith("usm_host:")
    assert usm.export(array).sycl_queue == apart
    with usm.use(queue=device.filter_string):
        assert usm.export(np.ones(10)).sycl_queue.sycl_device == device


def test_a_wrong_queue_or_kind_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"no SYCL device is named 'gpu:9'; there are: opencl:cpu:0"):
        usm.use(queue="gpu:9")
    with pytest.raises(TypeError, match="got 'int'"):
        usm.use(queue=3)
    for kind in ("unknown", "SHARED", None, 3):
        with pytest.raises(ValueError, match="give 'host', 'device' or 'shared'"):
            usm.use(kind=kind)
    with pytest.raises(TypeError, match="takes an address or an array, got 'str'"):
        usm.kind_of("x")


def test_kinds_are_asked_of_any_pointer() -> None:
    for kind in ("host", "device", "shared"):
        array = usm.empty(100, kind=kind)
        assert usm.kind_of(array.address) == usm.kind_of(array.address + 799) == kind
        assert usm.kind_of(array) == usm.kind_of(array, queue=array.sycl_queue) == kind
    for address in (0, 1, 1 << 63, 1 << 70, -1):
        assert usm.kind_of(address) is usm.UsmKind.UNKNOWN


def test_the_last_reference_may_go_on_any_thread() -> None:
    with usm.use():
        held = [np.ones(size) for size in (10, 1000, 100_000, 1_000_000)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert not held


def test_tasks_carry_it_as_any_other_handler() -> None:
    async def child() -> str:
        await asyncio.sleep(0)
        return str(usm.kind_of(np.ones(10)))

    async def main() -> list[str]:
        async with usm.use():
            tasks = [asyncio.create_task(child()) for _ in range(3)]
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == ["shared"] * 3


def test_a_request_has_an_arena_in_usm_and_a_budget_limits_it() -> None:
    with ctxalloc.request(strategy=usm.Arena(), limit_bytes=1 << 20) as request:
        array = np.ones(1000)
        assert usm.kind_of(array) is usm.UsmKind.SHARED
        assert usm.kind_of(usm.export(array)) is usm.UsmKind.SHARED
        with pytest.raises(MemoryError):
            np.ones(1 << 20)
        del array
    assert request.stats.live_bytes == 0
    budget = ctxalloc.Budget(1 << 20, name="usm")
    handler = ctxalloc.register("usm budgeted", ctxalloc.strategies.Budgeted(usm.Pool(kind="host"), budget=budget))
    with ctxalloc.use(handler):
        array = np.ones(1000)
        assert budget.in_use_bytes == 8000
        with pytest.raises(MemoryError):
            np.ones(1 << 20)
        del array
    assert budget.in_use_bytes == 0


def test_a_tracked_pool_counts_back_to_zero() -> None:
    handler = ctxalloc.register("usm tracked", ctxalloc.strategies.Tracked(usm.Pool()))
    with ctxalloc.use(handler):
        array = np.ones(1000)
    exported = usm.export(array)
    (block,) = handler.live_blocks()
    assert block.size_bytes == 8000
    assert usm.kind_of(block.address) is usm.UsmKind.SHARED
    witness = weakref.ref(array)
    del array
    assert witness() is not None
    assert len(handler.live_blocks()) == 1
    del exported
    assert witness() is None
    assert not handler.live_blocks()


def test_nothing_of_sycl_is_loaded_before_it_is_asked_for() -> None:
    program = """if True:
        import os, sys, numpy, ctxalloc, ctxalloc.usm
        assert "dpctl" not in sys.modules and "OCL_ICD_FILENAMES" not in os.environ
        assert "libsycl" not in open("/proc/self/maps").read()
        ctxalloc.usm.asarray  # only named
        assert "dpctl" not in sys.modules
        with ctxalloc.use("usm_shared"):
            a = numpy.ones(3)
        assert "dpctl" in sys.modules and os.environ["OCL_ICD_FILENAMES"].endswith("/lib/libintelocl.so")
        assert [h.name for h in ctxalloc.handlers()][-3:] == ["usm_shared", "usm_host", "usm_device"]
    """
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)


def test_what_the_user_says_of_opencl_stays_and_no_device_is_an_error() -> None:
    program = """if True:
        import os, numpy, ctxalloc
        from ctxalloc import usm
        for ask in (lambda: ctxalloc.use("usm_shared"), lambda: usm.empty(3), lambda: usm.asarray([1])):
            try:
                ask()
            except RuntimeError as error:
                assert "there is no SYCL device: install intel-opencl-rt" in str(error), error
                assert "/nowhere.so" in str(error), error
            else:
                raise SystemExit(1)
        assert os.environ["OCL_ICD_FILENAMES"] == "/nowhere.so"
    """
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    environment |= {"OCL_ICD_FILENAMES": "/nowhere.so", "OCL_ICD_VENDORS": "/nowhere"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)


def test_without_dpctl_the_extra_is_named() -> None:
    program = """if True:
        import sys, numpy
        sys.modules["dpctl"] = None  # as if it were not installed
        import ctxalloc
        from ctxalloc import usm
        for ask in (lambda: ctxalloc.use("usm_shared"), lambda: ctxalloc.handler("usm_host"), lambda: usm.empty(3)):
            try:
                ask()
            except ImportError as error:
                assert "pip install ctxalloc[usm]" in str(error), error
            else:
                raise SystemExit(1)
        try:
            usm.export(numpy.ones(3))
        except ValueError as error:
            assert "not in USM" in str(error)
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_arrays_may_outlive_everything_but_the_process() -> None:
    program = """if True:
        import builtins, numpy, dpnp
        from ctxalloc import usm
        with usm.use():
            builtins.kept = [numpy.ones(size) for size in (10, 100_000, 10_000_000)]
        builtins.more = [usm.zeros(1000, kind=kind) for kind in ("host", "shared", "device")]
        builtins.theirs = dpnp.tensor.asarray(usm.zeros(10_000_000))
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_forked_child_may_read_and_free_and_is_refused_more_of_sycl() -> None:
    program = """if True:
        import os, numpy
        from ctxalloc import usm
        with usm.use(kind="host"):
            a = numpy.ones(100_000_000 // 8)
        x = usm.empty(3, kind="device")
        child = os.fork()
        if child == 0:
            assert a.sum() == a.size
            del a
            try:
                x.asnumpy()
            except RuntimeError as error:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert a.sum() == a.size
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)
