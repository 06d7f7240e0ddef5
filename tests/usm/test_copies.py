"""Copies between host and device: who is asked, in what order, awaited and cancelled; and a fuzzed round trip."""

import asyncio
import gc
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import dpctl
import dpctl.memory
import dpnp
import dpnp.tensor as dpt
import numpy as np
import pytest
from queues import apart, two_parts

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


@pytest.mark.parametrize("with_dpnp", [True, False])
def test_parts_that_lie_between_each_other_are_copied(
    kind: str, with_dpnp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_dpnp:
        monkeypatch.setattr("ctxalloc.usm._copies._tensors", lambda: None)
    values = np.arange(400).reshape(20, 20)
    array = usm.asarray(values, kind=kind)
    for to, from_ in (
        ((slice(None), slice(None, None, 2)), (slice(None), slice(1, None, 2))),
        ((slice(0, 10),), (slice(19, 9, -1),)),
        ((slice(None), 3), (5, slice(None))),
        ((slice(0, 19),), (slice(1, 20),)),
        ((slice(None, None, -1),), (slice(None),)),
    ):
        values[to] = values[from_].copy()
        usm.copy(array[to], array[from_])
        assert np.array_equal(array.asnumpy(), values)


def test_between_queues_and_contexts(kind: str) -> None:
    values = np.arange(10)
    here, there = usm.asarray(values, kind=kind), usm.zeros(10, int, kind=kind, queue=apart())
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


class OnQueue:
    """An array's memory on another queue."""

    def __init__(self, array: usm.Array, queue: dpctl.SyclQueue) -> None:
        self.array = array
        self.__sycl_usm_array_interface__ = array.__sycl_usm_array_interface__ | {"syclobj": queue}


def test_what_lies_between_the_elements_is_not_written(kind: str) -> None:
    """A neighbour writes the odd elements while the even ones are copied to: none of its writes is lost."""
    length = 1 << 20
    array = usm.zeros(length, np.int32, kind=kind)
    mine, values = array[::2], np.arange(length // 2, dtype=np.int32)
    # On a queue of the same context that the copies do not wait for.
    theirs = dpt.usm_ndarray(
        (length // 2,),
        np.int32,
        buffer=dpctl.memory.as_usm_memory(OnQueue(array, dpctl.SyclQueue())),
        strides=(2,),
        offset=1,
    )
    rounds = range(1, 41)
    turn, written = threading.Barrier(2), []

    def neighbour() -> None:
        for number in rounds:
            turn.wait()
            theirs[...] = number
            theirs.sycl_queue.wait()
            turn.wait()
            written.append(number)
            turn.wait()

    thread = threading.Thread(target=neighbour)
    thread.start()
    lost = 0
    for number in rounds:
        turn.wait()
        usm.copy(mine, values + number)
        turn.wait()
        now = array.asnumpy()
        lost += int((now[1::2] != number).any())
        assert np.array_equal(now[::2], values + number)
        turn.wait()
    thread.join()
    assert (lost, len(written)) == (0, 40)


LAYOUTS = [
    ((64, 512), (slice(None), slice(0, 4))),
    ((5, 12000), (slice(None), slice(100, 9100))),
    ((12, 12000), (slice(None), slice(100, 9100))),
    ((5, 600), (slice(None), slice(3, 300))),
    ((300,), slice(None, None, -1)),
    ((3000,), slice(5, None, 7)),
    ((16, 16, 40), (slice(2, 9), slice(None, None, -2), slice(1, None, 3))),
    ((100, 200), (slice(None), 3)),
]


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "c16"])
@pytest.mark.parametrize(("shape", "key"), LAYOUTS)
@pytest.mark.parametrize("with_dpnp", [True, False])
def test_parts_of_device_memory_are_copied_by_every_route(
    shape: tuple[int, ...], key: Any, dtype: str, with_dpnp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_dpnp:
        monkeypatch.setattr("ctxalloc.usm._copies._tensors", lambda: None)
    rng = np.random.default_rng(1)
    values, other = (rng.integers(0, 100, shape).astype(dtype) for _ in range(2))
    device, twin = usm.asarray(values, kind="device"), usm.asarray(other, kind="device")
    for transposed in (False, True):
        there = device[key].T if transposed else device[key]
        part = (other[key].T if transposed else other[key])[...]
        shared = usm.asarray(other)[key].T if transposed else usm.asarray(other)[key]
        theirs = twin[key].T if transposed else twin[key]
        for source in (part, part.copy(), shared, theirs, theirs.copy_to()):
            usm.copy(device, values)
            usm.copy(there, source)
            wanted = values.copy()
            wanted[key] = other[key]
            assert np.array_equal(device.asnumpy(), wanted)
            assert np.array_equal(there.asnumpy(), part)
            back = np.zeros((*part.shape, 3), dtype)
            usm.copy(back[..., 1], there)
            assert np.array_equal(back[..., 1], part)
            assert not back[..., ::2].any()


@pytest.mark.parametrize("to", KINDS)
def test_between_two_parts_of_a_device_it_goes_by_the_host(kind: str, to: str) -> None:
    """A queue on one part that copies another part's memory would never end: another process is waited for."""
    program = f"""if True:
        import dpctl, numpy as np
        from ctxalloc import usm
        parts = dpctl.SyclDevice().create_sub_devices(partition=1)
        context = dpctl.SyclContext(parts)
        one, two = (dpctl.SyclQueue(context, part) for part in parts[:2])
        values = np.arange(10)
        here, there = usm.asarray(values, kind={kind!r}, queue=one), usm.zeros(10, int, kind={to!r}, queue=two)
        usm.copy(there, here)
        assert there.asnumpy().tolist() == values.tolist()
        usm.copy(there[::2], here[5:])
        assert there.asnumpy()[::2].tolist() == [5, 6, 7, 8, 9]
        assert here.copy_to(queue=two, kind={to!r}).asnumpy().tolist() == values.tolist()
        for kind in ("host", "shared"):
            with usm.use(queue=one, kind=kind):
                numpys = np.arange(10)
            usm.copy(there, numpys + 1)
            usm.copy(there[::-1], numpys)
            usm.copy(numpys[1:], there[:-1])
            assert numpys.tolist() == [0, *range(9, 0, -1)], numpys
            with usm.use(queue=one, kind=kind):
                usm.copy(here[::3], there[::3])
    """
    two_parts()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_awaited_copy_between_two_parts_of_a_device_is_refused() -> None:
    one, two = two_parts()

    async def main() -> None:
        with pytest.raises(ValueError, match=r"of the same context and device .*; copy\(\) takes any"):
            usm.copy_async(usm.zeros(3, kind="device", queue=two), usm.zeros(3, kind="device", queue=one))
        with usm.use(queue=one):
            numpys = np.zeros(3)
        with pytest.raises(ValueError, match=r"of the same context and device .*; copy\(\) takes any"):
            usm.copy_async(usm.zeros(3, kind="device", queue=two), numpys)

    asyncio.run(main())


def test_threads_copy_by_one_queue_while_the_process_ends() -> None:
    """By chance: without turns at the queue, one in 30 such processes ended by a signal."""
    program = """
        import itertools, threading
        import numpy as np
        from ctxalloc import usm

        source = np.ones(100_000)
        enough = threading.Event()
        def loop(target):
            for number in itertools.count():
                usm.copy(target, source)
                if number == 3000:
                    enough.set()
        for target in [usm.empty(100_000) for _ in range(3)]:
            threading.Thread(target=loop, args=(target,), daemon=True).start()
        enough.wait()
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
