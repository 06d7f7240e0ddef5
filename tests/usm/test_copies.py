"""Copies between host and device: who is asked, in what order, awaited and cancelled; and a fuzzed round trip."""

import asyncio
import gc
import random
import subprocess
import sys
import weakref
from typing import Any

import dpctl
import dpctl.memory
import dpnp
import dpnp.tensor as dpt
import numpy as np
import pytest

from ctxalloc import _native, usm

KINDS = ("host", "shared", "device")


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("key", [..., (slice(None), slice(None, None, 2)), slice(None, None, -1), slice(0, 0), 1])
def test_each_kind_to_each_with_any_strides(kind: str, to: str, key: Any) -> None:
    values = np.arange(24.0).reshape(4, 6)
    source = usm.asarray(values, kind=kind)[key]
    target = usm.zeros((4, 6), kind=to)
    usm.copy(target[key], source)
    wanted = np.zeros((4, 6))
    wanted[key] = values[key]
    assert np.array_equal(target.asnumpy(), wanted)
    usm.copy(target[key], np.ones((4, 6))[key])
    back = np.zeros((4, 6))
    usm.copy(back[key], target[key])
    wanted = np.zeros((4, 6))
    wanted[key] = 1
    assert np.array_equal(back, wanted)
    assert np.array_equal(source.copy_to(kind=to).asnumpy(), values[key])


def test_parts_that_overlap_are_copied_as_numpy_does(kind: str) -> None:
    values = np.arange(100)
    array = usm.asarray(values, kind=kind)
    usm.copy(array[1:], array[:-1])
    usm.copy(array[:50], array[25:75])
    values[1:] = values[:-1].copy()
    values[:50] = values[25:75].copy()
    assert np.array_equal(array.asnumpy(), values)


def test_between_queues_and_contexts(kind: str) -> None:
    device = dpctl.SyclDevice()
    apart = dpctl.SyclQueue(dpctl.SyclContext(device), device)
    values = np.arange(10)
    here, there = usm.asarray(values, kind=kind), usm.zeros(10, int, kind=kind, queue=apart)
    usm.copy(there, here)
    assert there.asnumpy().tolist() == values.tolist()
    usm.copy(here[::2], there[5:])
    assert here.asnumpy()[::2].tolist() == [5, 6, 7, 8, 9]


def test_what_cannot_be_copied_is_said() -> None:
    array = usm.zeros(10)
    for source in (np.zeros(9), np.zeros(10, int), np.zeros((10, 1))):
        with pytest.raises(ValueError, match="they must be the same"):
            usm.copy(array, source)
    for wrong in ([0.0] * 10, None, b"x"):
        with pytest.raises(TypeError, match="the source of a copy is"):
            usm.copy(array, wrong)
    with pytest.raises(TypeError, match="cannot live in a USM array"):
        usm.copy(array, np.array(["x"] * 10))
    readonly = np.zeros(10)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        usm.copy(readonly, array)


def test_copies_come_after_kernels_that_were_submitted_before() -> None:
    array = usm.zeros(1 << 22, np.float32, kind="device")
    theirs = dpt.asarray(array)
    for _ in range(20):
        theirs += 1
    assert array.asnumpy().min() == 20
    usm.copy(array, np.zeros(1 << 22, np.float32))
    theirs += 1
    assert dpt.asnumpy(theirs).max() == 1


def test_awaited_copies_in_order() -> None:
    async def main() -> None:
        values = np.arange(1 << 20, dtype=np.int32)
        device = usm.empty(values.shape, values.dtype, kind="device")
        twin = usm.empty(values.shape, values.dtype, kind="device")
        back = np.empty_like(values)
        waiting = [usm.copy_async(device, values), usm.copy_async(twin, device), usm.copy_async(back, twin)]
        await asyncio.gather(*waiting)
        assert np.array_equal(back, values)
        await usm.copy_async(usm.empty(0), np.empty(0))

    asyncio.run(main())


def test_the_loop_runs_while_a_copy_is_waited_for() -> None:
    async def main() -> None:
        device = usm.zeros(32 << 20, np.uint8, kind="device")
        theirs = dpt.asarray(device)
        for _ in range(50):
            theirs += 1
        back = np.empty(device.shape, device.dtype)
        waiting = asyncio.ensure_future(usm.copy_async(back, device))
        turns = 0
        while not waiting.done():
            turns += 1
            await asyncio.sleep(0)
        await waiting
        assert turns > 1
        assert (back == 50).all()

    asyncio.run(main())


def test_a_cancelled_wait_lets_go_of_nothing_before_the_copy_is_over() -> None:
    async def main() -> None:
        for _ in range(50):
            source, target = usm.zeros(1 << 20, np.uint8, kind="device"), np.empty(1 << 20, np.uint8)
            task = asyncio.ensure_future(usm.copy_async(target, source))
            del source, target
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        last = np.ones(1000, np.uint8)
        await usm.copy_async(last, usm.zeros(1000, np.uint8, kind="device"))
        assert not last.any()
        for _ in range(1000):  # their threads may still have to let go
            gc.collect()
            if _native.UsmMemory.live() == before:
                break
            await asyncio.to_thread(usm.empty(1).sycl_queue.wait)
            await usm.copy_async(last, usm.zeros(1000, np.uint8))
        assert _native.UsmMemory.live() <= before + 1

    before = _native.UsmMemory.live()
    asyncio.run(main())


def test_what_cannot_be_awaited_is_said() -> None:
    array = usm.zeros(10)
    with pytest.raises(RuntimeError, match="no running event loop"):
        usm.copy_async(array, np.zeros(10))

    async def main() -> None:
        with pytest.raises(ValueError, match="neither side"):
            usm.copy_async(np.zeros(10), np.zeros(10))
        for target, source in ((array[::2], np.zeros(5)), (array, np.zeros(20)[::2]), (array[1:], array[:-1])):
            with pytest.raises(ValueError, match="contiguous array"):
                usm.copy_async(target, source)

    asyncio.run(main())


def test_a_process_may_end_while_copies_run() -> None:
    program = """if True:
        import asyncio, numpy
        from ctxalloc import usm
        async def main():
            device = usm.zeros(64 << 20, numpy.uint8, kind="device")
            for _ in range(10):
                asyncio.ensure_future(usm.copy_async(numpy.empty(64 << 20, numpy.uint8), device))
        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_memory_goes_when_the_last_owner_does_whoever_that_is(kind: str) -> None:
    array = usm.zeros(100, kind=kind)
    witness = weakref.ref(array._owner)
    chain: Any = array
    for wrap in (dpt.asarray, usm.asarray, dpnp.from_dlpack, usm.from_dlpack, dpctl.memory.as_usm_memory):
        chain = wrap(chain)
    del array
    gc.collect()
    assert witness() is not None
    del chain
    gc.collect()
    assert witness() is None


DTYPES = ("?", "i1", "u2", "i4", "u4", "i8", "f4", "f8", "c8", "c16")


def _random_view(rng: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    def key(length: int) -> Any:
        choice = rng.randrange(5)
        if choice == 0:
            return slice(None)
        if choice == 1 and length:
            return rng.randrange(-length, length)
        step = rng.choice([1, 2, 3, -1, -2])
        return slice(*(rng.choice([None, rng.randrange(-length - 1, length + 2)]) for _ in range(2)), step)

    return tuple(key(length) for length in shape)


@pytest.mark.parametrize("seed", range(60))
def test_a_fuzzed_round_trip(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        shape = tuple(rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rng.randrange(4)))
        dtype, kind = rng.choice(DTYPES), rng.choice(KINDS)
        values = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
        key = _random_view(rng, shape)
        wanted = values[(*key, ...)]
        ours = usm.asarray(values, kind=kind)[key]
        routes = {
            "copied": ours.asnumpy(),
            "dpnp.tensor": dpt.asnumpy(dpt.asarray(ours)),
            "dpnp": dpnp.asnumpy(dpnp.asarray(ours)),
            "dlpack": dpnp.asnumpy(dpnp.from_dlpack(ours)),
            "dlpack and back": usm.from_dlpack(ours).asnumpy(),
            "dpnp and back": usm.asarray(dpt.asarray(ours)).asnumpy(),
            "their view": usm.asarray(dpnp.asarray(values, usm_type=kind)[(*key, ...)]).asnumpy(),
            "another kind": ours.copy_to(kind=rng.choice(KINDS)).asnumpy(),
        }
        if kind != "device":
            routes["numpy"] = np.asarray(ours)
            routes["numpy by dlpack"] = np.from_dlpack(ours, device="cpu")
            with usm.use(kind=kind):
                made = np.array(values)[(*key, ...)]
            routes["exported"] = np.asarray(usm.export(made))
            routes["exported to dpnp"] = dpt.asnumpy(dpt.asarray(usm.export(made)))
        for route, got in routes.items():
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), (seed, route, shape, key, dtype, kind)
            assert np.array_equal(got, wanted), (seed, route, shape, key, dtype, kind)
