"""An asyncio service: each request prepares a batch in SYCL's shared memory, and dpnp works on it without a copy.

It needs `pip install ctxalloc[usm] dpnp`, and prints::

    request 0: 'shared' memory, without a copy: True, sum 64512
    request 1: 'shared' memory, without a copy: True, sum 66560
    request 2: 'shared' memory, without a copy: True, sum 68608
    request 3: 'shared' memory, without a copy: True, sum 70656
    requests that are still there: 0
"""

import asyncio

import dpnp
import numpy as np

import ctxalloc
from ctxalloc import KiB, usm

ROWS, COLUMNS = 64, 32


async def prepare(number: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Stands for reading files or asking a database: plain NumPy."""
    batch = np.empty((ROWS, COLUMNS), np.float32)
    for row in range(ROWS):
        batch[row] = number + row
        if row % 16 == 0:
            await asyncio.sleep(0)  # others prepare theirs meanwhile
    return batch


async def answer(number: int) -> str:
    """One request: an arena of its own in USM, and a limit."""
    async with ctxalloc.request(strategy=usm.Arena(kind="shared"), limit_bytes=256 * KiB, name=f"batch {number}"):
        batch = await prepare(number)
        exported = usm.export(batch)
        on_device = dpnp.asarray(exported)
        same = on_device.__sycl_usm_array_interface__["data"][0] == batch.ctypes.data
        total = on_device.sum()  # a kernel, on the device
        result = usm.asarray(total)
        host = np.empty(result.shape, result.dtype)
        await usm.copy_async(host, result)  # the loop goes on while SYCL computes
        return f"request {number}: '{exported.kind}' memory, without a copy: {same}, sum {float(host):.0f}"


async def main() -> None:
    """Serves some requests at a time."""
    for line in await asyncio.gather(*(answer(number) for number in range(4))):
        print(line)
    for _ in range(500):
        if ctxalloc.request_metrics().present == 0:
            break
        await asyncio.sleep(0.01)  # threads of SYCL let go of what a kernel was given, a moment after its end
    print(f"requests that are still there: {ctxalloc.request_metrics().present}")


if __name__ == "__main__":
    asyncio.run(main())
