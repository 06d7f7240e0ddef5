"""What a block of SYCL's memory costs, made and freed: from dpctl, and from the pool over it. `make bench-usm`.

Each figure is the least of seven runs, in one process on one thread. Both sides of the first table are called from
Python in the same way, so what the call costs is in both.
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import dpctl.memory
import dpnp
import dpnp.tensor
import numpy as np

from ctxalloc import _native, usm

SIZES = (64, 4096, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


def microseconds(work: Callable[[], object], count: int = 1000) -> float:
    """The time of one call, of at least `count`."""
    while True:
        begun = perf_counter()
        for _ in range(count):
            work()
        if (taken := perf_counter() - begun) > 0.02:
            break
        count *= 4
    runs = [taken]
    for _ in range(6):
        begun = perf_counter()
        for _ in range(count):
            work()
        runs.append(perf_counter() - begun)
    return min(runs) / count * 1e6


def parts_of_a_device() -> None:
    """Prints what it takes to copy between an ndarray and a part of device memory, here and in dpnp."""
    whole, half = slice(None), slice(None, None, 2)
    cases: list[tuple[str, tuple[int, ...], tuple[slice, ...]]] = [
        ("4 of 2048 columns", (16384, 2048), (whole, slice(4))),
        ("1024 of 2048 columns", (4096, 2048), (whole, slice(1024))),
        ("every second of 4 Mi", (4 << 20,), (half,)),
        ("every second of 2000", (2000,), (half,)),
        ("4 Mi backwards", (4 << 20,), (slice(None, None, -1),)),
        ("three axes", (64, 256, 256), (whole, slice(10, 20), slice(None, None, 3))),
    ]
    print("\nfloat32 of a device, in part: a copy to it, and from it (dpnp's in brackets)")
    for name, shape, key in cases:
        ours = usm.zeros(shape, np.float32, kind="device")
        theirs = dpnp.tensor.zeros(shape, dtype=np.float32, usm_type="device")
        values = np.ones(shape, np.float32)[key].copy()

        def assign(theirs: Any = theirs, key: Any = key, values: Any = values) -> None:
            theirs[key] = values
            theirs.sycl_queue.wait()

        works = (
            partial(usm.copy, ours[key], values),
            assign,
            partial(usm.copy, values, ours[key]),
            partial(lambda theirs, key: dpnp.tensor.asnumpy(theirs[key]), theirs, key),
        )
        to, their_to, from_, their_from = (microseconds(work, 5) / 1000 for work in works)
        print(f"{name:>24} {to:>7.2f} ms ({their_to:>6.2f}) {from_:>7.2f} ms ({their_from:>6.2f})")


def main() -> None:
    """Prints the tables."""
    for kind in ("shared", "host", "device"):
        make = getattr(dpctl.memory, f"MemoryUSM{kind.capitalize()}")
        one = usm.empty(1, kind=kind)
        queue = one.sycl_queue
        print(f"\n{kind}: one block, made and freed")
        print(f"{'bytes':>10} {'dpctl':>10} {'ctxalloc':>10}")
        for size in SIZES:
            theirs = microseconds(partial(make, size, queue=queue))
            native = one._queue  # noqa: SLF001 - what arrays are made of
            ours = microseconds(partial(_native.UsmMemory, native, kind, size, zeroed=False))
            print(f"{size:>10} {theirs:>7.2f} us {ours:>7.3f} us  {theirs / ours:>5.0f} times")
    print("\nnumpy.empty, made and freed")
    print(f"{'bytes':>10} {'default':>10} {'usm_shared':>10}")
    for size in SIZES:
        plain = microseconds(partial(np.empty, size, np.uint8))
        with usm.use():
            ours = microseconds(partial(np.empty, size, np.uint8))
        print(f"{size:>10} {plain:>7.3f} us {ours:>7.3f} us")
    parts_of_a_device()
    array = usm.zeros(1000)
    memory = dpctl.memory.MemoryUSMShared(8000)
    with usm.use():
        host = np.zeros(1000)
    print("\none call")
    for name, work in (
        ("usm.export(ndarray)", lambda: usm.export(host)),
        ("usm.empty(1000)", lambda: usm.empty(1000)),
        ("dpctl.memory.as_usm_memory(array)", lambda: dpctl.memory.as_usm_memory(array)),
        ("usm.asarray(dpctl's memory)", lambda: usm.asarray(memory)),
        ("numpy.asarray(array)", lambda: np.asarray(array)),
    ):
        print(f"{name:>36} {microseconds(work):>7.2f} us")


if __name__ == "__main__":
    main()
