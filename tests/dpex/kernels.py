"""numba-dpex runs kernels over our memory without a copy. `make test-dpex` sets up its environment and runs this.

numba-dpex ended with 0.23.0 (2024) and wants the NumPy, Numba and dpctl of its time, so it has an environment of its
own. Local memory is a `LocalAccessor` in 0.23; before that it was `numba_dpex.local.array`. Each line printed that ends
with "right, no copy" is a check that held; one that does not hold ends the script with an AssertionError.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import dpctl
import dpctl.tensor as dpt
import numba_dpex as dpex
import numpy as np
from numba_dpex import kernel_api as kapi

from ctxalloc import usm

N = 1 << 20
GROUP = 64


@dpex.kernel  # type: ignore[untyped-decorator]
def add(item: kapi.Item, a: Any, b: Any, c: Any) -> None:
    i = item.get_id(0)
    c[i] = a[i] + b[i]


@dpex.kernel  # type: ignore[untyped-decorator]
def reverse_groups(item: kapi.NdItem, a: Any, local: Any) -> None:
    """Each group of work turns its stretch around, by way of local memory."""
    i = item.get_global_id(0)
    j = item.get_local_id(0)
    local[j] = a[i]
    kapi.group_barrier(item.get_group(), kapi.MemoryScope.WORK_GROUP)
    a[i] = local[item.get_local_range(0) - 1 - j]


def seen_by_dpctl(array: usm.Array) -> Any:
    """The array as dpctl sees it: the same memory."""
    seen = dpt.asarray(array)
    assert seen.__sycl_usm_array_interface__["data"][0] == array.__sycl_usm_array_interface__["data"][0], "a copy"
    return seen


def microseconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(25):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def main() -> None:
    queue = dpt.empty(1).sycl_queue
    print(
        f"numba-dpex {dpex.__version__}, dpctl {dpctl.__version__}, NumPy {np.__version__}, on {queue.sycl_device.name}"
    )

    for kind in ("shared", "host", "device"):
        a, b = (usm.asarray(np.arange(N, dtype=np.float32), kind=kind, queue=queue) for _ in range(2))
        c = usm.zeros(N, np.float32, kind=kind, queue=queue)
        dpex.call_kernel(add, dpex.Range(N), *(seen_by_dpctl(array) for array in (a, b, c)))
        assert (c.asnumpy() == 2 * np.arange(N, dtype=np.float32)).all()
        print(f"a kernel over three arrays of ours, {kind}: right, no copy")

    with usm.use(queue=queue, kind="shared"):
        numpys = np.arange(N, dtype=np.float32)
    seen = seen_by_dpctl(usm.export(numpys, queue=queue))
    dpex.call_kernel(reverse_groups, dpex.NdRange((N,), (GROUP,)), seen, kapi.LocalAccessor(GROUP, dtype=seen.dtype))
    assert (numpys == np.arange(N, dtype=np.float32).reshape(-1, GROUP)[:, ::-1].ravel()).all()
    print("a kernel with local memory, in place in an array of NumPy's: right, no copy")

    ours = usm.zeros(N, np.float32, kind="shared", queue=queue)
    theirs = dpt.zeros(N, dtype="f4", usm_type="shared", sycl_queue=queue)
    over_ours, over_theirs = seen_by_dpctl(ours), theirs
    run = [lambda x=x: dpex.call_kernel(add, dpex.Range(N), x, x, x) for x in (over_ours, over_theirs)]
    in_ours, in_theirs = (microseconds(work) for work in run)
    print(f"4 MiB of shared memory: {in_ours:.0f} us a kernel over ours, {in_theirs:.0f} us over dpctl's")


if __name__ == "__main__":
    main()
