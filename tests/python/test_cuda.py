"""`ctxalloc.cuda` on the driver of tests/cuda/driver.c: NumPy's arrays in pinned and managed memory."""

import asyncio
import gc
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
from fake_cuda import Fake, fake

import ctxalloc
from ctxalloc import KiB, MiB, cuda
from ctxalloc.strategies import Budgeted, Tracked, Zeroing

pytestmark = pytest.mark.any_numpy


@pytest.fixture
def driver() -> Iterator[Fake]:
    """The driver, with nothing that waits before and after."""
    loaded = fake()
    loaded.settle()
    yield loaded
    loaded.settle()
    assert cuda.info()["waiting_bytes"] == 0
    assert cuda.info()["kept"] == 0


def kept_in(kind: cuda.CudaKind | str) -> np.ndarray:
    with cuda.use(kind):  # type: ignore[arg-type]
        return np.ones(3)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("kind", ["host", "managed"])
def test_arrays_of_a_scope_are_in_memory_of_its_kind(driver: Fake, kind: cuda.CudaKind) -> None:
    with cuda.use(kind):
        made = [np.empty(10), np.zeros(1 << 20, np.uint8), np.ones((300, 300))]
        grown = np.arange(10)
        grown.resize(100_000, refcheck=False)
    for array in (*made, grown):
        assert cuda.kind_of(array) == kind
        assert ctxalloc.handler_of(array).name == f"cuda_{kind}"  # type: ignore[union-attr]
    assert not made[1].any()
    assert grown[:10].tolist() == list(range(10))
    assert not grown[10:].any()
    assert cuda.kind_of(np.empty(10)) is cuda.CudaKind.PAGEABLE
    assert cuda.kind_of(address(made[0])) == kind
    assert cuda.kind_of(np.int64(address(made[0]))) == cuda.kind_of(np.uint64(address(made[0]))) == kind


def test_the_handlers_are_found_by_name_and_registered_once(driver: Fake) -> None:
    assert ctxalloc.handler("cuda_host") is cuda.handler() is cuda.handler("host", device=0)
    assert ctxalloc.handler("cuda_managed") is cuda.handler("managed")
    with ctxalloc.use("cuda_host"):
        assert cuda.kind_of(np.ones(3)) == "host"
    assert "Quarantined" in repr(cuda.Pool())


def test_an_array_that_died_is_not_reused_while_a_copy_reads_it(driver: Fake) -> None:
    driver.set(progress=0)
    with cuda.use():
        first = np.full(2 * MiB, 7, np.uint8)
        place = address(first)
        driver.copy(first)
        del first
        second = np.full(2 * MiB, 8, np.uint8)
        assert address(second) != place
        assert cuda.info()["waiting_bytes"] >= 2 * MiB
        driver.run()  # ends the process if the bytes changed
        third = np.full(2 * MiB, 9, np.uint8)
    assert address(third) == place, "the device is done"


def test_keep_holds_arrays_of_unsafe_memory_until_their_stream_is_done(driver: Fake) -> None:
    driver.set(progress=0)
    handler = ctxalloc.register("cuda unsafe", cuda.Pool(reuse="unsafe"))
    with ctxalloc.use(handler):
        array = np.full(1000, 3, np.uint8)
    driver.copy(array)
    cuda.keep(array, stream=77)
    place = address(array)
    del array
    with ctxalloc.use(handler):
        others = [np.full(1000, 4, np.uint8) for _ in range(5)]
    assert place not in {address(other) for other in others}
    assert cuda.info()["kept"] == 1
    driver.run()
    assert cuda.info()["kept"] == 0


def test_keep_waits_for_a_stream_of_a_context_of_the_users_own(driver: Fake) -> None:
    driver.set(progress=0)
    array = np.ones(3)
    driver.copy(array)
    cuda.keep(array, stream=88)
    del array
    assert cuda.info()["kept"] == 1
    driver.run()
    assert cuda.info()["kept"] == 0


def test_keep_refuses_a_stream_that_captures(driver: Fake) -> None:
    driver.set(capturing=1)
    for stream in (1, 77, 88):
        with pytest.raises(RuntimeError, match=r"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED \(900\); a stream captures"):
            cuda.keep(np.ones(3), stream=stream)
    assert cuda.info()["kept"] == 0


def test_streams_of_the_libraries_are_understood(driver: Fake) -> None:
    torch = type("Stream", (), {"cuda_stream": 77, "device": type("Device", (), {"index": 0})()})()
    cupy = type("Stream", (), {"ptr": 77, "device_id": 0})()
    core = type("Stream", (), {"__cuda_stream__": lambda self: (0, 77)})()
    for stream in (torch, cupy, core, 0, 1, 2, 77):
        cuda.keep(np.ones(3), stream=stream)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_HANDLE \(400\).*device="):
        cuda.keep(np.ones(3), stream=78)
    for wrong in ("7", None, True, 1.5):
        with pytest.raises(TypeError, match="is no stream"):
            cuda.keep(np.ones(3), stream=wrong)
    with pytest.raises(TypeError, match="is no stream"):
        cuda.keep(np.ones(3), stream=np.ones(2, int))
    with pytest.raises(ValueError, match="is no stream"):
        cuda.keep(np.ones(3), stream=-1)
    for answer in (77, (9, 77), (0,), None):
        odd = type("Stream", (), {"__cuda_stream__": lambda self, answer=answer: answer})()
        with pytest.raises(TypeError, match=r"__cuda_stream__ of .* must be a tuple \(0, "):
            cuda.keep(np.ones(3), stream=odd)


def test_keep_takes_arrays_one_by_one(driver: Fake) -> None:
    with pytest.raises(TypeError, match=r"keep\(stream=1\) has no array"):
        cuda.keep(stream=1)
    for wrong in ("abc", 3, [np.ones(3)], None):
        with pytest.raises(TypeError, match=r"takes arrays, one by one, got"):
            cuda.keep(np.ones(3), wrong, stream=1)
    cuda.keep(np.ones(3), memoryview(b"abc"), cuda.as_cuda(kept_in("host")), stream=1)


def test_a_capture_is_not_disturbed(driver: Fake) -> None:
    before = driver.get("invalidated")
    with cuda.use(), cuda.capturing():
        driver.set(capturing=1)
        for size in (100, 5 * MiB):  # memory is mapped and freed meanwhile
            for _ in range(100):
                np.empty(size, np.uint8)
        with pytest.raises(RuntimeError, match="as long as the graph"):
            cuda.keep(np.ones(3), stream=1)
        assert cuda.info()["capturing"]
        assert cuda.info()["waiting_blocks"] > 0
        driver.set(capturing=0)
    assert driver.get("invalidated") == before
    assert not cuda.info()["capturing"]


def test_a_capture_ends_with_its_object_if_its_block_never_began(driver: Fake) -> None:
    announced = cuda.capturing()
    announced.__enter__()  # and then a signal's exception, before the block
    assert cuda.info()["capturing"]
    del announced
    gc.collect()
    assert not cuda.info()["capturing"]


def test_signals_leave_no_capture_on(driver: Fake) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(500):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while True:
                    with cuda.capturing():
                        pass
            except KeyboardInterrupt:
                pass
            assert not cuda.info()["capturing"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_capture_is_used_again_and_not_entered_twice(driver: Fake) -> None:
    again = cuda.capturing()
    for _ in range(2):
        with again:
            assert cuda.info()["capturing"]
            with pytest.raises(RuntimeError, match="entered already"):
                again.__enter__()
            with cuda.capturing():
                pass
            assert cuda.info()["capturing"]
        assert not cuda.info()["capturing"]

    @cuda.capturing()  # type: ignore[operator]
    def count(left: int) -> bool:
        return count(left - 1) if left else bool(cuda.info()["capturing"])

    assert count(2)
    assert not cuda.info()["capturing"]


def test_limits_hold_for_pinned_bytes(driver: Fake) -> None:
    before = cuda.info()["mappings"]
    with ctxalloc.request(strategy=cuda.Arena(), limit_bytes=MiB, name="small", strict=True) as request:
        array = np.ones(600 * KiB, np.uint8)
        assert cuda.kind_of(array) == "host"
        assert request.stats.live_bytes == 600 * KiB
        with pytest.raises(MemoryError):
            np.ones(600 * KiB, np.uint8)
        del array
        np.ones(600 * KiB, np.uint8)
        escaped = np.arange(1000)
    assert escaped.sum() == 499_500
    del escaped
    ctxalloc.trim()
    driver.settle()
    ctxalloc.trim()
    assert cuda.info()["mappings"] <= before + 1  # what the shared pool keeps warm


def test_a_budget_and_a_list_of_blocks_stand_on_the_pool(driver: Fake) -> None:
    handler = ctxalloc.register("cuda batches", Tracked(Budgeted(cuda.Pool(), limit_bytes=MiB)))
    with ctxalloc.use(handler):
        array = np.empty(1000)
        with pytest.raises(MemoryError):
            np.empty(2 * MiB)
    assert [block.size_bytes for block in handler.live_blocks() or []] == [8000]
    assert cuda.kind_of(array) == "host"


def test_each_task_has_its_own(driver: Fake) -> None:
    async def work(kind: str | None) -> str:
        async with cuda.use("managed") if kind == "managed" else cuda.use() if kind else nullcontext():
            await asyncio.sleep(0)
            return str(cuda.kind_of(np.ones(100)))

    async def main() -> list[str]:
        return await asyncio.gather(*(work(kind) for kind in ("host", None, "managed", "host")))

    assert asyncio.run(main()) == ["host", "pageable", "managed", "host"]


def test_huge_pages_and_pools_with_options_of_their_own(driver: Fake) -> None:
    for number, pool in enumerate(
        [cuda.Pool(huge_pages=True), cuda.Pool(near_device=False), cuda.Pool(warm_bytes=0, decay_seconds=0)]
    ):
        with ctxalloc.use(ctxalloc.register(f"cuda pool {number}", pool)):
            assert cuda.kind_of(np.ones(MiB)) == "host"


def test_wrong_arguments_are_told(driver: Fake) -> None:
    with pytest.raises(ValueError, match=r"kind='device'.*'host' or 'managed'"):
        cuda.use("device")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"no CUDA device 9; there are 1.*CUDA_ERROR_INVALID_DEVICE \(101\)"):
        cuda.use(device=9)
    for wrong in ("0", True, 1.0):
        with pytest.raises(TypeError, match="an int from 0 up"):
            cuda.handler(device=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an int from 0 up"):
        cuda.device(-1)
    with pytest.raises(ValueError, match=r"cuda\.Pool\(reuse='later'\).*'events' or 'unsafe'"):
        cuda.Pool(reuse="later")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"huge_pages=1.*True or False"):
        cuda.Pool(huge_pages=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cuda\.Arena\(\) takes its options by name: give kind='host'"):
        cuda.Arena("host")
    with pytest.raises(TypeError, match="an address or an array, got 'str'"):
        cuda.kind_of("a")
    with pytest.raises(ValueError, match="from 1 up"):
        cuda.configure(quarantine_bytes=0)
    for out_of_range in (-1, 1 << 64, np.int64(-1)):
        with pytest.raises(ValueError, match=r"from 0 up and below 2\*\*64, got"):
            cuda.kind_of(out_of_range)
    for scalar in (np.float64(3), np.bool_(True), np.str_("a")):  # they have an interface, to a copy of theirs
        with pytest.raises(TypeError, match="an address or an array"):
            cuda.kind_of(scalar)


def test_what_is_said_of_driver_and_device(driver: Fake) -> None:
    info = cuda.info()
    assert (info["state"], info["error"], info["version"], info["safe_reuse"]) == ("ready", None, (12, 5), True)
    assert info["devices"] == [cuda.device(0)] == [cuda.device()]
    assert info["devices"][0]["name"] == "Fake 0"
    assert cuda.is_available()


def test_too_much_that_waits_is_refused(driver: Fake) -> None:
    before = cuda.info()["quarantine_bytes"]
    driver.set(progress=0)
    try:
        cuda.configure(quarantine_bytes=2 * MiB)
        with cuda.use():
            first, second = np.ones(2 * MiB, np.uint8), np.ones(2 * MiB, np.uint8)
            driver.copy(first)
            del first, second
            with pytest.raises(MemoryError):
                np.ones(MiB, np.uint8)
            driver.run()
            np.ones(MiB, np.uint8)
    finally:
        cuda.configure(quarantine_bytes=before)


def test_a_strategy_that_wipes_is_refused_over_cuda(driver: Fake) -> None:
    for upstream in (cuda.Pool(), cuda.Arena(), Tracked(cuda.Pool(kind="managed"))):
        with pytest.raises(ValueError, match=r"Zeroing\(\): a device may read a block .* after it was freed"):
            Zeroing(upstream)
    with ctxalloc.use(ctxalloc.register("wiped", Zeroing(cuda.Pool(reuse="unsafe")))):
        assert np.ones(1000).sum() == 1000


def test_many_kept_arrays_do_not_make_the_next_one_dear(driver: Fake) -> None:
    driver.set(progress=0)
    with cuda.use():
        array = np.ones(10)
    for _ in range(1000):
        driver.copy(array)
        cuda.keep(array, stream=0)
    before = driver.get("queries")
    cuda.keep(array, stream=0)
    assert driver.get("queries") - before <= 16
    assert cuda.info()["kept"] == 1001
    driver.run()
    cuda.settle()
    assert cuda.info()["kept"] == 0


def test_random_programs_never_change_bytes_under_a_copy(driver: Fake) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    strategies = [ctxalloc.register(f"cuda random {seed} {n}", cuda.Arena()) for n in range(2)]
    lock = threading.Lock()
    failed: list[BaseException] = []

    def program(number: int) -> None:
        rng = random.Random(seed + number)
        live: list[np.ndarray] = []
        try:
            for _ in range(400):
                with lock:
                    driver.set(progress=rng.randrange(3))
                step = rng.random()
                if step < 0.4:
                    with ctxalloc.use(rng.choice([*strategies, cuda.handler()])):
                        live.append(np.full(rng.choice([10, 1000, 70_000, 400_000]), rng.randrange(256), np.uint8))
                elif step < 0.6 and live:
                    driver.copy(rng.choice(live))
                elif step < 0.9 and live:
                    live.pop(rng.randrange(len(live)))
                else:
                    driver.run(rng.randrange(4))
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failed.append(error)

    threads = [threading.Thread(target=program, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
