"""How long memory, pools and contexts stay: no longer than somebody needs them."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import dpctl
import dpctl.memory
import numpy as np
from queues import apart

import ctxalloc
from ctxalloc import MiB, usm
from ctxalloc.usm import _runtime


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _touched(queue: Any, kind: str) -> usm.Array:
    array = usm.empty(16 * MiB, np.uint8, kind=kind, queue=queue)
    usm.copy(array, np.ones(16 * MiB, np.uint8))
    return array


def test_queues_of_one_context_share_one_pool(kind: str) -> None:
    usm.empty(1, kind=kind)
    queues = [dpctl.SyclQueue() for _ in range(40)]
    _touched(queues[0], kind)
    gc.collect()
    before = _resident_bytes()
    handlers = len(list(ctxalloc.handlers()))
    for queue in queues:
        _touched(queue, kind)
    assert _resident_bytes() - before < 64 * MiB
    assert len(list(ctxalloc.handlers())) == handlers
    assert len({usm.handler(queue, kind) for queue in queues}) == 1


def test_memory_of_a_context_goes_back_with_its_last_array(kind: str) -> None:
    _touched(apart(), kind)
    gc.collect()
    before, handlers = _resident_bytes(), len(list(ctxalloc.handlers()))
    for _ in range(40):
        assert _touched(apart(), kind).handler is None
    assert _resident_bytes() - before < 64 * MiB
    assert len(list(ctxalloc.handlers())) == handlers


def test_a_context_in_a_dict_has_one_queue_however_often_it_is_given() -> None:
    queue = apart()

    class Exporter:
        def __init__(self, context: Any, memory: Any) -> None:
            self.memory = memory
            self.__sycl_usm_array_interface__ = {
                "shape": (10,), "typestr": "|u1", "data": (memory._pointer, False), "version": 1, "syclobj": context,
            }  # fmt: skip

    memory = dpctl.memory.MemoryUSMShared(10, queue=queue)
    queues = {usm.asarray(Exporter(queue.sycl_context, memory)).sycl_queue for _ in range(10)}
    assert len(queues) == 1
    default = usm.empty(1).sycl_queue
    memory = dpctl.memory.MemoryUSMShared(10, queue=default)
    assert usm.asarray(Exporter(default.sycl_context, memory)).sycl_queue == default


def test_asking_of_an_unknown_address_stays_quick_after_many_contexts() -> None:
    host = np.ones(10)
    for _ in range(100):
        usm.empty(10, queue=apart())
        usm.kind_of(host)
    gc.collect()
    most = _runtime._MAX_RECENT + 1 + len(_runtime._kept)
    assert len(_runtime.known_queues(host.ctypes.data)) <= most
    assert usm.kind_of(host) is usm.UsmKind.UNKNOWN


def test_an_array_of_any_context_is_found_by_its_address() -> None:
    arrays = [usm.empty(10, kind="device", queue=apart()) for _ in range(40)]
    assert {usm.kind_of(array.address) for array in arrays} == {"device"}
    assert {usm.kind_of(array) for array in arrays} == {"device"}


def test_a_handler_is_one_for_each_context_and_device() -> None:
    queue = apart()
    twin = dpctl.SyclQueue(queue.sycl_context, queue.sycl_device, property="in_order")
    handler = usm.handler(queue, "host")
    assert handler is usm.handler(twin, "host") is not usm.handler(kind="host")
    assert usm.empty(3, kind="host", queue=twin).handler is handler
    with usm.use(queue=twin, kind="host"):
        array = np.ones(10)
    assert ctxalloc.handler_of(array) is handler
    assert usm.export(array, queue=twin).sycl_queue == twin


PROGRAM = """if True:
    import sys, time
    import numpy as np
    import ctxalloc
    from ctxalloc import MiB, usm
    ctxalloc.configure(decay_seconds=float(sys.argv[1]))
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    usm.empty(1)
    usm.copy(usm.empty(1 * MiB, np.uint8, kind="device"), np.ones(1 * MiB, np.uint8))
    before = resident()
    arrays = [usm.empty(16 * MiB, np.uint8, kind=kind) for kind in ("host", "shared", "device") for _ in range(4)]
    ones = np.ones(16 * MiB, np.uint8)
    for array in arrays:
        usm.copy(array, ones)
    assert resident() - before > 150 * MiB
    del array, ones
    arrays.clear()
"""


def test_warm_memory_goes_back_by_itself() -> None:
    wait = """
    deadline = time.monotonic() + 60
    while resident() - before > 80 * MiB:
        assert time.monotonic() < deadline, (resident() - before) / MiB
        time.sleep(0.01)
    """
    subprocess.run([sys.executable, "-c", PROGRAM + wait, "0.1"], check=True, timeout=100)


def test_a_process_may_end_while_memory_goes_back() -> None:
    for decay in ("0.01", "0.05", "0.1", "0.2"):
        subprocess.run([sys.executable, "-c", PROGRAM + f"\n    time.sleep({decay})\n", decay], check=True, timeout=100)
