"""What a block of SYCL's memory costs, made and freed: from dpctl, and from the pool over it. `make bench-usm`.

Each figure is the least of seven runs, in one process on one thread. Both sides of the first table are called from
Python in the same way, so what the call costs is in both.
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter

import dpctl.memory
import numpy as np

from ctxalloc import _native, usm

SIZES = (64, 4096, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


def microseconds(work: Callable[[], object]) -> float:
    """The time of one call."""
    count = 1000
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


def main() -> None:
    """Prints the tables."""
    for kind in ("shared", "host", "device"):
        handler = usm.handler(kind=kind)
        make = getattr(dpctl.memory, f"MemoryUSM{kind.capitalize()}")
        queue = usm.empty(1, kind=kind).sycl_queue
        print(f"\n{kind}: one block, made and freed")
        print(f"{'bytes':>10} {'dpctl':>10} {'ctxalloc':>10}")
        for size in SIZES:
            theirs = microseconds(partial(make, size, queue=queue))
            ours = microseconds(partial(_native.UsmMemory, handler, size, zeroed=False))
            print(f"{size:>10} {theirs:>7.2f} us {ours:>7.3f} us  {theirs / ours:>5.0f} times")
    print("\nnumpy.empty, made and freed")
    print(f"{'bytes':>10} {'default':>10} {'usm_shared':>10}")
    for size in SIZES:
        plain = microseconds(partial(np.empty, size, np.uint8))
        with usm.use():
            ours = microseconds(partial(np.empty, size, np.uint8))
        print(f"{size:>10} {plain:>7.3f} us {ours:>7.3f} us")
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
