"""Arrays in pinned and managed memory of a real driver: what they are, options, limits, services."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from on_device import Device, address

import ctxalloc
from ctxalloc import GiB, KiB, MiB, cuda

KINDS = ("host", "managed")
# Each is told in docs/cuda.md.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"huge_pages": True},
    {"near_device": False},
    {"huge_pages": True, "near_device": False},
    {"reuse": "unsafe"},
    {"warm_bytes": 0, "decay_seconds": 0},
    {"kind": "managed"},
    {"kind": "managed", "reuse": "unsafe"},
]


def test_the_driver_is_ready_and_says_what_it_is(device: Device) -> None:
    info = cuda.info()
    assert (info["state"], info["error"], info["safe_reuse"]) == ("ready", None, True)
    assert info["version"] >= (12, 5)
    first = info["devices"][0]
    assert first == cuda.device() == cuda.device(0)
    assert first["name"]
    assert first["registers_host_memory"]
    assert cuda.is_available()


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_a_scope_are_of_its_kind_and_aligned(device: Device, kind: cuda.CudaKind) -> None:
    with cuda.use(kind):
        zeros = np.zeros(1 << 20, np.uint8)
        made = [np.empty(10), zeros, np.ones((300, 300)), np.empty(9 * MiB, np.uint8), np.empty(3, "V7")]
        grown = np.arange(10)
        grown.resize(100_000, refcheck=False)
    for array in (*made, grown):
        assert cuda.kind_of(array) == kind
        assert cuda.kind_of(address(array) + array.nbytes - 1) == kind
        assert address(array) % 64 == 0
        assert ctxalloc.handler_of(array).name == f"cuda_{kind}"  # type: ignore[union-attr]
    assert not zeros.any()
    assert grown[:10].tolist() == list(range(10))
    assert not grown[10:].any()


def test_other_memory_is_told_apart(device: Device) -> None:
    assert cuda.kind_of(np.empty(10)) == "pageable"
    assert cuda.kind_of(np.empty(100 * MiB, np.uint8)) == "pageable"
    place = device.allocate(1000)
    assert cuda.kind_of(place) == cuda.kind_of(place + 999) == "device"
    assert cuda.kind_of(0) == "pageable"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_arrive_in_both_directions(device: Device, kind: cuda.CudaKind) -> None:
    stream, rng = device.stream(), np.random.default_rng(7)
    for size in (1, 1000, MiB + 3, 33 * MiB):
        with cuda.use(kind):
            there, back = np.empty(size, np.uint8), np.zeros(size, np.uint8)
        there[:] = rng.integers(0, 256, size, np.uint8)
        place = device.allocate(size)
        device.to_device(place, there, stream)
        device.next(place, place, size, stream)
        device.from_device(back, place, stream)
        device.wait(stream)
        assert np.array_equal(back, there + np.uint8(1))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_reach_arrays_at_the_hosts_addresses(device: Device, kind: cuda.CudaKind) -> None:
    with cuda.use(kind):
        array = np.zeros(5 * MiB, np.uint8)
    assert cuda.as_cuda(array).__cuda_array_interface__["data"][0] == address(array)
    for turn in range(1, 6):  # host and device by turns
        device.next(address(array), address(array), array.nbytes)
        device.wait()
        assert (array == turn * 10 + 1 if turn > 1 else array == 1).all()
        array[:] = (turn + 1) * 10
    assert (array == 60).all()


def test_managed_memory_is_used_by_host_and_device_at_once(device: Device) -> None:
    stream = device.stream()
    with cuda.use("managed"):
        one, other = np.ones(2 * MiB, np.uint8), np.ones(2 * MiB, np.uint8)
        gate = device.gate(stream)
        device.next(address(one), address(one), one.nbytes, stream)
        other += 5
        fresh = np.zeros(3 * MiB, np.uint8)
        assert (other == 6).all()
        assert not fresh.any()
    assert gate.is_closed(), "the host waited for the device"
    gate.open()
    device.wait(stream)
    assert (one == 2).all()


def test_a_mapping_is_of_4_mib_and_goes_when_it_is_trimmed(device: Device) -> None:
    handler = ctxalloc.register("device mappings", cuda.Pool(warm_bytes=0, decay_seconds=0.0))
    before = cuda.info()["mapped_bytes"]
    with ctxalloc.use(handler):
        array = np.ones(10)
        assert cuda.info()["mapped_bytes"] - before >= 4 * MiB
        big = np.ones(70 * MiB, np.uint8)
    assert cuda.info()["mapped_bytes"] - before >= 74 * MiB
    where = address(big)
    del array, big
    device.wait()
    cuda.settle()
    ctxalloc.trim()
    assert cuda.info()["mapped_bytes"] <= before
    assert cuda.kind_of(where) == "pageable"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_option_gives_memory_that_a_device_copies(device: Device, options: dict[str, Any]) -> None:
    place, stream = device.allocate(8 * MiB), device.stream()
    wanted = options.get("kind", "host")
    handler = ctxalloc.register(f"device {options}", cuda.Pool(**options))
    arena = cuda.Arena(**options)
    for selected in (ctxalloc.use(handler), ctxalloc.request(strategy=arena)):
        with selected:
            array = np.full(8 * MiB, 3, np.uint8)
            assert cuda.kind_of(array) == wanted
            device.to_device(place, array, stream)
            device.wait(stream)
            del array
        assert (device.bytes_at(place, 8 * MiB) == 3).all()


def test_more_than_there_is_is_a_memory_error_and_no_more(device: Device) -> None:
    with cuda.use():  # pinned only: a device can hang where more managed memory is asked for than it has
        with pytest.raises(MemoryError):
            np.empty(1 << 47, np.uint8)
        assert np.ones(1000).sum() == 1000


def test_requests_of_a_service_have_memory_of_their_own(device: Device) -> None:
    size, count = 300 * KiB, 40
    streams = [device.stream() for _ in range(4)]
    places = [device.allocate(size) for _ in range(count)]

    async def serve(number: int) -> int:
        async with ctxalloc.request(strategy=cuda.Arena(), limit_bytes=MiB, name="device service") as request:
            for value in (number, number + 1):
                array = np.full(size, value, np.uint8)
                await asyncio.sleep(0)
                device.to_device(places[number], array, streams[number % 4])
                del array
                await asyncio.sleep(0)
            assert np.asarray(request.stats.peak_bytes) >= size
            assert cuda.kind_of(np.ones(10)) == "host"
            return request.stats.live_bytes

    async def plain() -> str:
        await asyncio.sleep(0)
        return str(cuda.kind_of(np.ones(1000)))

    async def main() -> list[Any]:
        return await asyncio.gather(*(serve(number) for number in range(count)), plain())

    *left, outside = asyncio.run(main())
    assert outside == "pageable"
    assert left == [0] * count
    device.wait()
    for number, place in enumerate(places):
        assert (device.bytes_at(place, size) == number + 1).all()


def test_threads_copy_and_drop_arrays_and_no_byte_changes(device: Device) -> None:
    failed: list[BaseException] = []
    arenas = [ctxalloc.register(f"device threads {number}", cuda.Arena(kind=KINDS[number])) for number in range(2)]
    lanes = [(device.stream(), device.allocate(64 * MiB)) for _ in range(6)]

    def work(lane: int) -> None:
        rng = np.random.default_rng(lane)
        stream, place = lanes[lane]
        try:
            device.enter()
            for _ in range(12):
                expected, at = [], 0
                while at < 24 * MiB:
                    size, value = int(rng.choice([100, 70_000, 400_000, 3_000_000])), int(rng.integers(1, 256))
                    with ctxalloc.use([cuda.handler(), cuda.handler("managed"), *arenas][rng.integers(4)]):
                        array = np.full(size, value, np.uint8)
                        device.to_device(place + at, array, stream)
                        del array  # a copy still reads it
                        np.full(size, 0, np.uint8)
                    expected.append((at, size, value))
                    at += size
                device.wait(stream)
                found = device.bytes_at(place, at)
                for begin, size, value in expected:
                    assert (found[begin : begin + size] == value).all()
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(len(lanes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_large_array_is_pinned_whole(device: Device) -> None:
    place, stream = device.allocate(GiB), device.stream()
    with ctxalloc.request(strategy=cuda.Arena()):
        array = np.ones(GiB, np.uint8)
        array[-1] = 9
        gate = device.gate(stream)
        device.to_device(place, array, stream)  # one registration encloses the copy: it does not block
        assert gate.is_closed()
        gate.open()
        device.wait(stream)
    assert device.bytes_at(place + GiB - 2, 2).tolist() == [1, 9]
