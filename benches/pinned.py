"""What pinned memory brings, on a CUDA device: the table of benches/RESULTS.md. `make bench-cuda`.

Needs the driver and a device, and prints what it lacks of CuPy, PyTorch and RMM, whose rows it then leaves out. Copies
by the driver alone need none of them. Each figure is the median of interleaved rounds; each row says its unit.
"""

import ctypes
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ctxalloc
from ctxalloc import GiB, KiB, MiB, cuda

ROUNDS = 9
SIZES = (64 * KiB, 1 * MiB, 16 * MiB, 256 * MiB)


class Driver:
    """The few more functions of the driver that copies need, by ctypes, in the primary context of device 0."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxPushCurrent_v2", context)
        self.stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(self.stream), 1)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._c, name)(*arguments)
        if code:
            sys.exit(f"{name} returned {code}")

    def allocate(self, size_bytes: int) -> ctypes.c_uint64:
        """Memory of the device."""
        found = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(found), ctypes.c_size_t(size_bytes))
        return found

    def to_device(self, place: ctypes.c_uint64, array: np.ndarray) -> None:
        """Queues a copy."""
        address = ctypes.c_void_p(array.ctypes.data)
        self("cuMemcpyHtoDAsync_v2", place, address, ctypes.c_size_t(array.nbytes), self.stream)

    def from_device(self, array: np.ndarray, place: ctypes.c_uint64) -> None:
        """Queues a copy."""
        address = ctypes.c_void_p(array.ctypes.data)
        self("cuMemcpyDtoHAsync_v2", address, place, ctypes.c_size_t(array.nbytes), self.stream)

    def wait(self) -> None:
        """Waits for what was queued."""
        self("cuStreamSynchronize", self.stream)

    def bare(self, size_bytes: int) -> None:
        """Allocates pinned memory and frees it."""
        found = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(found), ctypes.c_size_t(size_bytes), 3)
        self("cuMemFreeHost", found)


def library(name: str) -> Any:
    """A library, or None, which is said."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"lacks {name}: {error}")
        return None


def seconds(works: dict[str, Callable[[], object]], *, repeats: int = 1) -> dict[str, float]:
    """The median time of each, in interleaved rounds; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, work in works.items():
            begun = time.perf_counter()
            for _ in range(repeats):
                work()
            if turn:
                times[name].append((time.perf_counter() - begun) / repeats)
    return {name: statistics.median(found) for name, found in times.items()}


def row(what: str, found: dict[str, float], unit: str) -> None:
    """Prints a row of the table."""
    print(f"{what:<42}", *(f"{name} {value:,.2f}" for name, value in found.items()), unit, sep="  ")


def arrays(size_bytes: int) -> dict[str, np.ndarray]:
    """The same bytes, pageable and pinned."""
    made = {"pageable": np.ones(size_bytes, np.uint8)}
    with cuda.use():
        made["pinned"] = np.ones(size_bytes, np.uint8)
    assert cuda.kind_of(made["pinned"]) == "host"
    return made


def bandwidth(driver: Driver, torch: Any, cupy: Any) -> None:
    """GB/s in both directions, by the driver, PyTorch and CuPy."""
    for size_bytes in SIZES:
        both = arrays(size_bytes)
        place = driver.allocate(size_bytes)

        def rates(works: dict[str, Callable[[], object]], size_bytes: int = size_bytes) -> dict[str, float]:
            return {name: size_bytes / took / 1e9 for name, took in seconds(works).items()}

        def queued(copy: Callable[..., None], *arguments: Any) -> Callable[[], None]:
            def work() -> None:
                copy(*arguments)
                driver.wait()

            return work

        size_text = f"{size_bytes // KiB} KiB"
        row(f"to the device, driver, {size_text}",
            rates({name: queued(driver.to_device, place, array) for name, array in both.items()}), "GB/s")  # fmt: skip
        row(f"to the host, driver, {size_text}",
            rates({name: queued(driver.from_device, one, place) for name, one in both.items()}), "GB/s")  # fmt: skip
        driver("cuMemFree_v2", place)
        if torch is not None:

            def to_torch(array: np.ndarray) -> None:
                torch.from_numpy(array).to("cuda", non_blocking=True)
                torch.cuda.synchronize()

            row(f"torch .to(non_blocking), {size_text}",
                rates({name: lambda array=array: to_torch(array) for name, array in both.items()}), "GB/s")  # fmt: skip
        if cupy is not None:
            on_device = cupy.zeros(size_bytes, cupy.uint8)

            def to_cupy(array: np.ndarray) -> None:
                cupy.asarray(array)
                cupy.cuda.get_current_stream().synchronize()

            row(f"cupy.asarray, {size_text}",
                rates({name: lambda array=array: to_cupy(array) for name, array in both.items()}), "GB/s")  # fmt: skip
            row(f"cupy get(out=), {size_text}",
                rates({name: lambda array=array, one=on_device: one.get(out=array) for name, array in both.items()}),
                "GB/s")  # fmt: skip


def overlap(torch: Any) -> None:
    """How long a kernel and a copy on another stream take together, of the sum of both."""
    if torch is None:
        return
    matrix = torch.ones((8192, 8192), device="cuda")
    side = torch.cuda.Stream()
    for name, array in arrays(256 * MiB).items():
        tensor = torch.from_numpy(array)

        def copy(tensor: Any = tensor) -> None:
            with torch.cuda.stream(side):
                tensor.to("cuda", non_blocking=True)

        def kernel() -> None:
            for _ in range(4):
                matrix @ matrix

        def timed(*works: Callable[[], None]) -> Callable[[], None]:
            def work() -> None:
                for one in works:
                    one()
                torch.cuda.synchronize()

            return work

        took = seconds({"kernel": timed(kernel), "copy": timed(copy), "both": timed(kernel, copy)})
        row(f"kernel and copy, {name}", {key: value * 1e3 for key, value in took.items()}, "ms")


def seen_as_pinned(torch: Any, cupy: Any) -> None:
    """What the libraries say of an array, and whether they take it by DLPack without a copy."""
    both = arrays(1 * MiB)
    over = cuda.as_cuda(both["pinned"])
    if torch is not None:
        print("torch is_pinned:", {name: torch.from_numpy(array).is_pinned() for name, array in both.items()})
    for name, module in (("torch", torch), ("cupy", cupy)):
        if module is None:
            continue
        try:
            taken = module.from_dlpack(over)
            same = (taken.data_ptr() if name == "torch" else taken.data.ptr) == both["pinned"].ctypes.data
            print(f"{name}.from_dlpack(CUDAHost): {'without a copy' if same else 'a copy'}, on {taken.device}")
        except Exception as error:  # noqa: BLE001 - the answer is what is asked for
            print(f"{name}.from_dlpack(CUDAHost): {type(error).__name__}: {error}")


def pools(driver: Driver, torch: Any, cupy: Any, rmm: Any) -> None:
    """Allocating and freeing one block."""
    scope = cuda.use()
    with scope:
        for size_bytes in (4 * KiB, 1 * MiB, 64 * MiB):
            works: dict[str, Callable[[], object]] = {
                "numpy in cuda_host": lambda size=size_bytes: np.empty(size, np.uint8),
                "cuMemHostAlloc": lambda size=size_bytes: driver.bare(size),
            }
            if cupy is not None:
                works["cupy"] = lambda size=size_bytes: cupy.cuda.alloc_pinned_memory(size)
            if torch is not None:
                works["torch"] = lambda size=size_bytes: torch.empty(size, dtype=torch.uint8, pin_memory=True)
            if rmm is not None and hasattr(rmm.mr, "PinnedHostMemoryResource"):
                pool = rmm.mr.PoolMemoryResource(rmm.mr.PinnedHostMemoryResource(), 256 * MiB)
                works["rmm"] = lambda size=size_bytes, pool=pool: pool.deallocate(pool.allocate(size), size)
            took = seconds(works, repeats=20)
            row(f"allocate and free, {size_bytes // KiB} KiB", {k: v * 1e6 for k, v in took.items()}, "us")


def pinning(driver: Driver) -> None:
    """What a mapping costs: its pages, pinning them, and unpinning; with huge pages and without."""
    for size_bytes in (4 * MiB, 64 * MiB, 512 * MiB):

        def fresh(handler: ctxalloc.Handler, size_bytes: int = size_bytes) -> None:
            with ctxalloc.use(handler):
                np.empty(size_bytes, np.uint8)
            ctxalloc.trim()

        works: dict[str, Callable[[], object]] = {"cuMemHostAlloc": lambda size=size_bytes: driver.bare(size)}
        for name, huge_pages in (("pages", False), ("huge pages", True)):
            pool = cuda.Pool(huge_pages=huge_pages, warm_bytes=0, decay_seconds=0.0)
            handler = ctxalloc.register(f"bench {name} {size_bytes}", pool)
            works[name] = lambda handler=handler, fresh=fresh: fresh(handler)
        row(f"map and pin, {size_bytes // MiB} MiB", {k: v * 1e3 for k, v in seconds(works).items()}, "ms")


def hazard(driver: Driver) -> None:
    """How often a copy carried other bytes than it was given, when its array died at once."""
    size_bytes = 4 * MiB
    slow, place = [driver.allocate(1 * GiB) for _ in range(2)], driver.allocate(size_bytes)
    unsafe = ctxalloc.register("bench unsafe", cuda.Pool(reuse="unsafe"))
    for name, handler in (("events", cuda.handler()), ("unsafe", unsafe)):
        wrong, rounds = 0, 20
        for _ in range(rounds):
            with ctxalloc.use(handler):
                array = np.full(size_bytes, 1, np.uint8)
                for _ in range(100):  # keeps the stream busy before the copy
                    driver("cuMemcpyDtoDAsync_v2", slow[0], slow[1], ctypes.c_size_t(1 * GiB), driver.stream)
                driver.to_device(place, array)
                del array
                others = [np.full(size_bytes, 2, np.uint8) for _ in range(3)]
            driver.wait()
            back = np.empty(size_bytes, np.uint8)
            driver.from_device(back, place)
            driver.wait()
            wrong += bool((back != 1).any())
            del others
        print(f"bytes changed under a copy, reuse={name!r}: {wrong} of {rounds}")


def main() -> None:
    known = cuda.info()
    if known["state"] != "ready":
        sys.exit(f"bench-cuda needs a CUDA device: {known['error']}")
    print("driver", known["version"], "on", [one["name"] for one in known["devices"]], "numpy", np.__version__)
    torch, cupy, rmm = (library(name) for name in ("torch", "cupy", "rmm"))
    if torch is not None and not torch.cuda.is_available():
        print("lacks a PyTorch with CUDA")
        torch = None
    driver = Driver()
    bandwidth(driver, torch, cupy)
    overlap(torch)
    seen_as_pinned(torch, cupy)
    pools(driver, torch, cupy, rmm)
    pinning(driver)
    hazard(driver)
    print("at the end:", {key: value for key, value in cuda.info().items() if key != "devices"})


if __name__ == "__main__":
    main()
