"""PyTorch, CuPy, Numba and cuda.core on a real device: what they make of our arrays, and we of theirs."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from on_device import Device, address

import ctxalloc
from ctxalloc import MiB, cuda

KINDS = ("host", "managed")
SIZE = 2 * MiB
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture
def torch(device: Device) -> Iterator[Any]:
    found = library("torch")
    if not found.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    found.ones(SIZE, dtype=found.uint8, device="cuda").add_(1)  # loads its kernels
    found.cuda.synchronize()
    yield found
    device.open_gates()
    found.cuda.synchronize()


@pytest.fixture
def cupy(device: Device) -> Iterator[Any]:
    found = library("cupy")
    found.asarray(np.ones(SIZE, np.uint8)).get()
    yield found
    device.open_gates()
    found.cuda.Device().synchronize()


@pytest.fixture
def numba_cuda(device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    library("numba")
    if not hasattr(np, "row_stack"):  # gone in NumPy 2.5, and numba-cuda 0.30 asks for it
        monkeypatch.setattr(np, "row_stack", np.vstack, raising=False)
    return library("numba.cuda")


def ones(kind: str = "host", size: int = SIZE) -> np.ndarray:
    with cuda.use(kind):  # type: ignore[arg-type]
        return np.ones(size, np.uint8)


def filled_others(count: int = 8) -> list[np.ndarray]:
    return [np.full(SIZE, 8, np.uint8) for _ in range(count)]


# ---- PyTorch


@pytest.mark.parametrize("kind", KINDS)
def test_torch_sees_that_an_array_is_pinned(torch: Any, kind: str) -> None:
    assert torch.from_numpy(ones(kind)).is_pinned() == (kind == "host")
    assert not torch.from_numpy(np.ones(SIZE, np.uint8)).is_pinned()


def test_torchs_copy_does_not_block_and_keeps_no_array(torch: Any, device: Device) -> None:
    stream = device.stream()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)), cuda.use():
        torch.from_numpy(ones()).to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        array = np.full(SIZE, 7, np.uint8)
        is_alive, where = weakref.ref(array), address(array)
        gate = device.gate(stream)
        on_device = torch.from_numpy(array).to("cuda", non_blocking=True)
        assert gate.is_closed(), "the copy blocked"
        del array
        gc.collect()
        assert is_alive() is None
        others = filled_others()
        assert where not in map(address, others)
        assert gate.is_closed()
        gate.open()
        assert on_device.cpu().eq(7).all()


def test_torchs_copy_back_into_an_array_does_not_block(torch: Any, device: Device) -> None:
    stream = device.stream()
    array = ones()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        on_device = torch.full((SIZE,), 5, dtype=torch.uint8, device="cuda")
        torch.from_numpy(array).copy_(on_device, non_blocking=True)
        torch.cuda.synchronize()
        on_device.fill_(6)
        torch.cuda.synchronize()
        gate = device.gate(stream)
        torch.from_numpy(array).copy_(on_device, non_blocking=True)
        assert gate.is_closed(), "the copy blocked"
        gate.open()
        torch.cuda.synchronize()
    assert (array == 6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_torch_shares_an_array_and_keeps_it(torch: Any, kind: str) -> None:
    array = ones(kind)
    tensor = torch.from_numpy(array)
    assert tensor.data_ptr() == address(array)
    tensor.add_(1)
    assert (array == 2).all()
    is_alive = weakref.ref(array)
    del array
    assert is_alive() is not None
    del tensor
    gc.collect()
    assert is_alive() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_dlpack_is_taken_without_a_copy(device: Device, name: str, kind: str) -> None:
    taker = library(name)
    array = ones(kind)
    try:
        seen = taker.from_dlpack(cuda.as_cuda(array))
    except (BufferError, TypeError) as error:
        pytest.skip(f"{name} {taker.__version__} does not take {kind} memory by DLPack: {error}")
    assert (seen.data_ptr() if name == "torch" else seen.data.ptr) == address(array)
    seen += 1
    device.wait()
    assert (array == 2).all()
    is_alive = weakref.ref(array)
    del array
    assert is_alive() is not None
    del seen
    gc.collect()
    assert is_alive() is None


@pytest.mark.parametrize("kind", KINDS)
def test_torch_takes_the_cuda_array_interface(torch: Any, kind: str) -> None:
    array = ones(kind)
    tensor = torch.as_tensor(cuda.as_cuda(array), device="cuda")
    assert tensor.data_ptr() == address(array)
    tensor.add_(1)
    torch.cuda.synchronize()
    assert (array == 2).all()


def test_a_pinned_tensor_of_torchs_is_an_ndarray(torch: Any) -> None:
    tensor = torch.full((3, 4), 5.0).pin_memory()
    array = cuda.asarray(tensor)
    assert address(array) == tensor.data_ptr()
    assert cuda.kind_of(array) == "host"
    assert array.tolist() == tensor.tolist()
    with pytest.raises(BufferError, match="copy it"):
        cuda.asarray(tensor.to("cuda"))
    with pytest.raises(BufferError, match="pageable"):
        cuda.asarray(torch.ones(1000))
    assert cuda.kind_of(tensor.to("cuda").data_ptr()) == "device"


def test_a_graph_of_torchs_is_captured_while_blocks_are_freed(torch: Any, device: Device) -> None:
    array = ones()
    static = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    source = torch.from_numpy(array)
    static.copy_(source, non_blocking=True).add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with cuda.capturing(), torch.cuda.graph(graph), cuda.use():
        static.copy_(source, non_blocking=True)
        static.add_(1)
        for size in (100, SIZE, 9 * MiB):
            for _ in range(70):
                np.empty(size, np.uint8)
    for value in (3, 4):
        array[:] = value
        graph.replay()
        torch.cuda.synchronize()
        assert static.eq(value + 1).all()


# ---- CuPy


def test_cupy_copies_straight_from_an_array_and_keeps_it(cupy: Any, device: Device) -> None:
    stream = device.stream()
    pinned_pool = cupy.get_default_pinned_memory_pool()
    with cupy.cuda.ExternalStream(stream), cuda.use():
        del_me = cupy.asarray(ones())
        del del_me
        device.wait()
        pinned_pool.free_all_blocks()
        array = np.full(SIZE, 7, np.uint8)
        is_alive = weakref.ref(array)
        gate = device.gate(stream)
        on_device = cupy.asarray(array)
        assert gate.is_closed(), "the copy blocked"
        del array
        gc.collect()
        assert is_alive() is not None, "CuPy keeps it until the copy is done"
        others = filled_others()
        assert gate.is_closed()
        gate.open()
        device.wait(stream)
        assert pinned_pool.n_free_blocks() == 0, "no pinned memory of CuPy's own"
        assert (on_device.get() == 7).all()
    del others


def test_cupy_gets_into_an_array_without_blocking(cupy: Any, device: Device) -> None:
    stream = device.stream()
    with cupy.cuda.ExternalStream(stream):
        on_device = cupy.full(SIZE, 5, cupy.uint8)
        array = ones()
        assert on_device.get(out=array) is array
        assert (array == 5).all()
        on_device[:] = 6
        device.wait()
        gate = device.gate(stream)
        on_device.get(out=array, blocking=False)
        assert gate.is_closed(), "the copy blocked"
        gate.open()
        device.wait(stream)
    assert (array == 6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_cupys_kernels_reach_an_array_without_a_copy(cupy: Any, kind: str) -> None:
    array = ones(kind)
    seen = cupy.asarray(cuda.as_cuda(array))
    assert seen.data.ptr == address(array)
    seen += 1
    cupy.cuda.Device().synchronize()
    assert (array == 2).all()
    assert int(seen.sum(dtype=cupy.int64)) == 2 * SIZE


def test_a_managed_array_of_cupys_is_an_ndarray_once_it_is_done(cupy: Any, device: Device) -> None:
    stream = device.stream()
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed), cupy.cuda.ExternalStream(stream):
        theirs = cupy.full(1000, 5, cupy.int32)
        theirs += 1
        device.wait()
        gate = device.gate(stream, seconds=0.3)
        theirs += 1
        array = cuda.asarray(theirs)
        assert gate.is_over(), "it waits for the stream"
        assert (array == 7).all()
        assert address(array) == theirs.data.ptr
        assert cuda.kind_of(array) == "managed"
    plain = cupy.ones(1000)
    with pytest.raises(BufferError, match="device's, which the host cannot read"):
        cuda.asarray(plain)
    assert cuda.kind_of(plain) == "device"


# ---- Numba


@pytest.mark.parametrize("kind", KINDS)
def test_numbas_kernels_reach_an_array_without_a_copy(numba_cuda: Any, kind: str) -> None:
    @numba_cuda.jit
    def more(values: Any) -> None:
        at = numba_cuda.grid(1)
        if at < values.size:
            values[at] += 1

    array = ones(kind, 5000)
    more[20, 256](cuda.as_cuda(array))
    numba_cuda.synchronize()
    assert (array == 2).all()
    seen = numba_cuda.as_cuda_array(cuda.as_cuda(array))
    more[20, 256](seen)
    numba_cuda.synchronize()
    assert (array == 3).all()


def test_numbas_copies_take_an_array(numba_cuda: Any, device: Device) -> None:
    stream = numba_cuda.stream()
    array = ones()
    numba_cuda.to_device(array, stream=stream)
    device.wait()
    number = cuda._state._handle_of(stream)
    gate = device.gate(number)
    on_device = numba_cuda.to_device(array, stream=stream)
    assert gate.is_closed(), "the copy blocked"
    cuda.keep(array, stream=stream)
    assert cuda.info()["kept"] == 1
    gate.open()
    device.wait(number)
    assert (on_device.copy_to_host() == 1).all()


def test_arrays_of_numbas_are_ndarrays(numba_cuda: Any) -> None:
    managed = numba_cuda.managed_array(1000)
    managed[:] = 5
    array = cuda.asarray(managed)
    assert (address(array), cuda.kind_of(array)) == (address(np.asarray(managed)), "managed")
    assert (array == 5).all()
    mapped = numba_cuda.mapped_array(1000)
    mapped[:] = 6
    assert (cuda.asarray(mapped) == 6).all()
    assert cuda.kind_of(numba_cuda.pinned_array(1000)) == "host"
    with pytest.raises(BufferError, match="copy it"):
        cuda.asarray(numba_cuda.device_array(1000))


# ---- streams of all


def test_streams_of_the_libraries_are_understood(torch: Any, cupy: Any, numba_cuda: Any, device: Device) -> None:
    streams = [
        torch.cuda.Stream(),
        torch.cuda.current_stream(),
        cupy.cuda.Stream(non_blocking=True),
        cupy.cuda.Stream.null,
        cupy.cuda.get_current_stream(),
        numba_cuda.stream(),
        numba_cuda.default_stream(),
        numba_cuda.legacy_default_stream(),
        numba_cuda.per_thread_default_stream(),
        device.stream(),
        0,
        1,
        2,
    ]
    for stream in streams:
        cuda.keep(ones(), stream=stream)
    device.wait()
    assert cuda.info()["kept"] == 0


def test_a_stream_of_cuda_cores_is_understood(device: Device) -> None:
    core = library("cuda.core")
    theirs = (core if hasattr(core, "Device") else library("cuda.core.experimental")).Device(0)
    theirs.set_current()
    stream = theirs.create_stream()
    array = ones()
    gate = device.gate(cuda._state._handle_of(stream))
    cuda.keep(array, stream=stream)
    assert cuda.info()["kept"] == 1
    gate.open()
    stream.sync()
    assert cuda.info()["kept"] == 0


def test_the_libraries_take_arrays_of_a_request(torch: Any, cupy: Any, device: Device) -> None:
    with ctxalloc.request(strategy=cuda.Arena(), limit_bytes=64 * MiB, name="device libraries") as request:
        array = np.full(SIZE, 7, np.uint8)
        tensor = torch.from_numpy(array).to("cuda", non_blocking=True)
        copied = cupy.asarray(array)
        del array
        np.full(SIZE, 9, np.uint8)
        assert request.stats.peak_bytes >= SIZE
    assert tensor.cpu().eq(7).all()
    assert (copied.get() == 7).all()
