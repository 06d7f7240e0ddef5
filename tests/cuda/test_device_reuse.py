"""Freed blocks on a real device: what a copy or kernel reads is not handed out before the device is done."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from on_device import CudaError, Device, address

import ctxalloc
from ctxalloc import MiB, cuda

KINDS = ("host", "managed")
SIZE = 2 * MiB


def warmed(count: int = 12) -> None:
    """Maps memory beforehand: what is tested is whether blocks are handed out, and not what mapping waits for."""
    for kind in KINDS:
        with cuda.use(kind):  # type: ignore[arg-type]
            made = [np.ones(SIZE, np.uint8) for _ in range(count)]
        del made
    cuda.settle()
    cuda.settle()


def reading(device: Device, work: str, stream: int) -> tuple[Callable[[np.ndarray], None], Callable[[], np.ndarray]]:
    """Queues work that reads an array; what it found there, less one if a kernel did."""
    place = device.allocate(SIZE)
    if work == "copy":
        return lambda array: device.to_device(place, array, stream), lambda: device.bytes_at(place, SIZE)

    def found() -> np.ndarray:
        return device.bytes_at(place, SIZE) - np.uint8(1)

    return lambda array: device.next(place, address(array), SIZE, stream), found


def test_a_copy_from_pinned_memory_does_not_block_and_others_do(device: Device) -> None:
    stream, place = device.stream(), device.allocate(8 * MiB)
    with cuda.use():
        pinned = np.ones(8 * MiB, np.uint8)
    with cuda.use("managed"):
        managed = np.ones(8 * MiB, np.uint8)
    pageable = np.ones(8 * MiB, np.uint8)
    for copy in (device.to_device, lambda place, array, stream: device.from_device(array, place, stream)):
        gate = device.gate(stream)
        copy(place, pinned, stream)
        assert gate.is_closed()
        gate.open()
        device.wait(stream)
        for array in (managed, pageable):
            gate = device.gate(stream, seconds=0.3)
            copy(place, array, stream)
            assert gate.is_over(), "the copy waited for the stream"
            device.wait(stream)
    gate = device.gate(stream)
    device.copy(place, address(managed), managed.nbytes, stream)  # one that does not say which side is the host's
    assert gate.is_closed()
    gate.open()
    device.wait(stream)


@pytest.mark.parametrize(("kind", "work"), [("host", "copy"), ("host", "kernel"), ("managed", "kernel")])
def test_a_block_is_not_reused_while_the_device_reads_it(device: Device, kind: cuda.CudaKind, work: str) -> None:
    warmed()
    stream = device.stream()
    read, found = reading(device, work, stream)
    with cuda.use(kind):
        array = np.full(SIZE, 7, np.uint8)
        place = address(array)
        gate = device.gate(stream)
        read(array)
        del array
        others = [np.full(SIZE, 8, np.uint8) for _ in range(8)]
        assert place not in map(address, others)
        assert cuda.info()["waiting_bytes"] >= SIZE
        assert cuda.settle() == 0
        assert gate.is_closed()
        gate.open()
        device.wait(stream)
        assert (found() == 7).all(), "bytes changed under the device"
        assert cuda.settle() >= SIZE
        again = [np.full(SIZE, 9, np.uint8) for _ in range(12)]
        assert place in map(address, again)


def test_a_block_that_the_device_writes_is_not_reused_before(device: Device) -> None:
    warmed()
    stream, place = device.stream(), device.filled(SIZE, 5)
    with cuda.use():
        array = np.zeros(SIZE, np.uint8)
        gate = device.gate(stream)
        device.from_device(array, place, stream)
        del array
        others = [np.full(SIZE, 8, np.uint8) for _ in range(8)]
        assert gate.is_closed()
        gate.open()
        device.wait(stream)
    assert all((other == 8).all() for other in others), "the device wrote into an array of others"


@pytest.mark.parametrize("work", ["copy", "kernel"])
def test_unsafe_reuse_changes_bytes_under_the_device(device: Device, work: str) -> None:
    stream = device.stream()
    read, found = reading(device, work, stream)
    with ctxalloc.use(ctxalloc.register(f"device unsafe {work}", cuda.Pool(reuse="unsafe"))):
        array = np.full(SIZE, 7, np.uint8)
        place = address(array)
        gate = device.gate(stream)
        read(array)
        del array
        other = np.full(SIZE, 8, np.uint8)
        assert address(other) == place
        assert gate.is_closed()
        gate.open()
        device.wait(stream)
    assert (found() == 8).all(), "the hazard that reuse='unsafe' names"


@pytest.mark.parametrize("flags", [0, 1])
def test_each_kind_of_stream_holds_blocks_back(device: Device, flags: int) -> None:
    warmed()
    for stream in (device.stream(flags), 0, 1, 2):
        read, found = reading(device, "copy", stream)
        with cuda.use():
            array = np.full(SIZE, 7, np.uint8)
            place = address(array)
            gate = device.gate(stream)
            read(array)
            del array
            others = [np.full(SIZE, 8, np.uint8) for _ in range(8)]
            assert place not in map(address, others), stream
            assert gate.is_closed()
            gate.open()
            device.wait()
        assert (found() == 7).all()


def test_small_blocks_wait_too(device: Device) -> None:
    stream = device.stream()
    place = device.allocate(100 * 1000)
    with cuda.use():
        gate = device.gate(stream)
        for number in range(100):
            array = np.full(1000, number, np.uint8)
            device.to_device(place + 1000 * number, array, stream)
            del array
        assert gate.is_closed()
        gate.open()
    device.wait(stream)
    found = device.bytes_at(place, 100 * 1000).reshape(100, 1000)
    assert (found == np.arange(100, dtype=np.uint8)[:, None]).all()


def test_an_array_that_grows_leaves_its_old_block_to_the_device(device: Device) -> None:
    warmed()
    stream = device.stream()
    read, found = reading(device, "copy", stream)
    with cuda.use():
        array = np.full(SIZE, 7, np.uint8)
        gate = device.gate(stream)
        read(array)
        array.resize(3 * SIZE, refcheck=False)
        array[:] = 8
        others = [np.full(SIZE, 8, np.uint8) for _ in range(8)]
        assert gate.is_closed()
        gate.open()
        device.wait(stream)
    assert (found() == 7).all()
    del others


def test_a_new_mapping_does_not_wait_for_the_device(device: Device) -> None:
    stream = device.stream()
    for kind in KINDS:
        gate = device.gate(stream)
        with ctxalloc.request(strategy=cuda.Arena(kind=kind)):  # type: ignore[arg-type]
            array = np.ones(40 * MiB, np.uint8)
            assert array.all()
        assert gate.is_closed(), kind
        gate.open()


def test_an_arenas_memory_stays_after_its_request_and_is_not_charged(device: Device) -> None:
    stream = device.stream()
    read, found = reading(device, "copy", stream)
    with ctxalloc.request(strategy=cuda.Arena(), name="device stays") as request:
        array = np.full(SIZE, 7, np.uint8)
        gate = device.gate(stream)
        read(array)
        del array
        assert request.stats.live_bytes == 0
        assert cuda.info()["waiting_bytes"] >= SIZE
    with ctxalloc.request(strategy=cuda.Arena()):
        others = [np.full(SIZE, 8, np.uint8) for _ in range(8)]
    assert cuda.info()["waiting_bytes"] >= SIZE
    assert gate.is_closed()
    gate.open()
    device.wait(stream)
    assert (found() == 7).all()
    del others


def test_too_much_that_waits_is_refused_until_the_device_is_done(device: Device) -> None:
    warmed()
    stream, place = device.stream(), device.allocate(SIZE)
    before = cuda.info()["quarantine_bytes"]
    cuda.configure(quarantine_bytes=SIZE)
    try:
        with cuda.use():
            for seconds, is_long in ((0.3, False), (10.0, True)):
                arrays = [np.ones(SIZE, np.uint8) for _ in range(2)]
                gate = device.gate(stream, seconds)
                for array in arrays:
                    device.to_device(place, array, stream)
                del array, arrays
                if is_long:
                    with pytest.raises(MemoryError):
                        np.ones(SIZE, np.uint8)
                    assert gate.is_closed(), "it waited for the device"
                    gate.open()
                    device.wait(stream)
                np.ones(SIZE, np.uint8)  # this one waits
                assert not gate.is_closed()
    finally:
        cuda.configure(quarantine_bytes=before)


def test_what_waits_goes_back_where_nobody_allocates(device: Device) -> None:
    with cuda.use():
        array = np.ones(SIZE, np.uint8)
    device.to_device(device.allocate(SIZE), array, 0)
    del array
    done = threading.Event()
    for _ in range(100):  # the decay thread asks each second
        if cuda.info()["waiting_bytes"] == 0:
            break
        done.wait(0.1)
    assert cuda.info()["waiting_bytes"] == 0


@pytest.mark.parametrize("own_context", [False, True])
def test_keep_holds_arrays_until_their_stream_is_done(device: Device, own_context: bool) -> None:
    used = Device(own_context=True) if own_context else device
    try:
        stream, place = used.stream(), used.allocate(SIZE)
        with ctxalloc.use(ctxalloc.register(f"device kept {own_context}", cuda.Pool(reuse="unsafe"))):
            array = np.full(SIZE, 7, np.uint8)
            where = address(array)
            gate = used.gate(stream)
            used.to_device(place, array, stream)
            cuda.keep(array, stream=stream)
            del array
            others = [np.full(SIZE, 8, np.uint8) for _ in range(5)]
            assert where not in map(address, others)
            assert cuda.info()["kept"] == 1
            assert gate.is_closed()
            gate.open()
            used.wait(stream)
            assert cuda.info()["kept"] == 0
        assert (used.bytes_at(place, SIZE) == 7).all()
    finally:
        used.open_gates()
        if own_context:
            used.end()
            device.enter()


def test_a_context_of_your_own_is_not_seen(device: Device) -> None:
    own = Device(own_context=True)
    try:
        stream, place = own.stream(), own.allocate(SIZE)
        with cuda.use():
            array = np.full(SIZE, 7, np.uint8)
            where = address(array)
            gate = own.gate(stream)
            own.to_device(place, array, stream)
            del array
            cuda.settle()
            others = [np.full(SIZE, 8, np.uint8) for _ in range(12)]
            assert where in map(address, others)
            assert gate.is_closed()
            gate.open()
            own.wait(stream)
    finally:
        own.open_gates()
        own.end()
        device.enter()


def test_a_stream_that_is_gone_is_told(device: Device) -> None:
    with pytest.raises(TypeError, match="is no stream"):
        cuda.keep(np.ones(3), stream=None)
    with pytest.raises(RuntimeError, match=r"there is no CUDA device 99|no CUDA device"):
        cuda.keep(np.ones(3), stream=1, device=99)


def captured(device: Device, stream: int, place: int) -> np.ndarray:
    """Captures a copy from pinned memory while blocks are freed and mapped, and returns the array that it reads."""
    array = np.full(SIZE, 7, np.uint8)
    device.begin_capture(stream)
    device.to_device(place, array, stream)
    for size in (100, 1000, SIZE, 9 * MiB):
        for _ in range(70):
            np.empty(size, np.uint8)
    return array


def test_a_capture_that_is_announced_is_not_disturbed(device: Device) -> None:
    stream, place = device.stream(), device.allocate(SIZE)
    with cuda.use(), cuda.capturing():
        array = captured(device, stream, place)
        with pytest.raises(RuntimeError, match="as long as the graph"):
            cuda.keep(array, stream=stream)
        info = cuda.info()
        assert info["capturing"]
        assert info["waiting_blocks"] > 0
        ready = device.end_capture(stream)
    for value in (1, 2):  # the graph reads its array each time
        array[:] = value
        device("cuGraphLaunch", ready, device.handle(stream))
        device.wait(stream)
        assert (device.bytes_at(place, SIZE) == value).all()
    device("cuGraphExecDestroy", ready)


def test_a_capture_that_is_not_announced_is_invalid(device: Device) -> None:
    stream, place = device.stream(), device.allocate(SIZE)
    with cuda.use():
        array = captured(device, stream, place)
        with pytest.raises(CudaError) as failed:
            device.end_capture(stream)
    assert failed.value.code == 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert "cuCtxRecordEvent" in str(cuda.info()["last_failure"])
    device.wait()
    assert array.all()


def test_keep_refuses_a_stream_that_captures(device: Device) -> None:
    stream, place = device.stream(), device.allocate(1000)
    with cuda.use():
        array = np.full(1000, 7, np.uint8)
    device.begin_capture(stream)
    try:
        device.to_device(place, array, stream)
        with pytest.raises(RuntimeError, match=r"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED \(900\)"):
            cuda.keep(array, stream=stream)
        assert cuda.info()["kept"] == 0
    finally:
        ready = device.end_capture(stream)  # the refusal did not disturb it
    device("cuGraphExecDestroy", ready)
