"""A service in asyncio that gives each request memory of its own, and each tenant no more than its share.

A request that asks for too much fails alone: its tenant's other requests and its neighbours go on. What outlives a
request (in a cache here) is counted at its end, and freed when the cache drops it.

`python examples/requests_with_budgets.py` prints::

    red   1 MiB: answered, peak 2 MiB
    red   9 MiB: refused, budget 'red' has no room for 9437184 more bytes: 9437184 of its 16777216 are in use
    blue  9 MiB: answered, peak 18 MiB
    blue  2 MiB: answered, peak 4 MiB
    the service kept 2 arrays of 88 bytes for its cache, at most 22 MiB were in use
    with the cache emptied 0 bytes are in use, and of 4 requests 0 are there
"""

import asyncio

import numpy as np
import numpy.typing as npt

import ctxalloc
from ctxalloc import Budget, MiB

SERVICE = Budget(256 * MiB, name="service")
TENANTS = {"red": Budget(16 * MiB, parent=SERVICE, name="red"), "blue": Budget(64 * MiB, parent=SERVICE, name="blue")}
cache: dict[tuple[str, int], npt.NDArray[np.float64]] = {}
kept: list[ctxalloc.Escaped] = []


async def work(tenant: str, size_bytes: int) -> None:
    """Make large arrays that are freed at the end, and a small one that stays."""
    data = np.ones(size_bytes // 8)
    await asyncio.sleep(0)  # the other requests are at work
    spectrum = np.sqrt(data)
    spectrum += data  # in place: whether NumPy finds this out by itself depends on the interpreter
    if tenant == "blue":
        cache[tenant, size_bytes] = spectrum[:11].copy()


async def answer(tenant: str, mebibytes: int) -> str:
    """One request, as a service would serve it."""
    scope = ctxalloc.request(budget=TENANTS[tenant], name=f"{tenant} {mebibytes}")
    try:
        async with scope:
            await work(tenant, mebibytes * MiB)
    except ctxalloc.BudgetExceeded as refused:
        return f"refused, {str(refused).partition(';')[0]}"
    if scope.escaped and scope.escaped.count:
        kept.append(scope.escaped)
    return f"answered, peak {scope.stats.peak_bytes // MiB} MiB"


async def main() -> None:
    asked = [("red", 1), ("red", 9), ("blue", 9), ("blue", 2)]
    answers = await asyncio.gather(*(answer(tenant, size) for tenant, size in asked))
    for (tenant, size), said in zip(asked, answers, strict=True):
        print(f"{tenant:5} {size} MiB: {said}")
    sizes = {escaped.bytes // escaped.count for escaped in kept}
    print(f"the service kept {len(kept)} arrays of {sizes.pop()} bytes for its cache, ", end="")
    print(f"at most {SERVICE.peak_bytes // MiB} MiB were in use")
    cache.clear()
    requests = ctxalloc.request_metrics()
    print(f"with the cache emptied {SERVICE.in_use_bytes} bytes are in use, ", end="")
    print(f"and of {requests.begun} requests {requests.present} are there")


if __name__ == "__main__":
    asyncio.run(main())
