"""``make demo-waiting``: a burst on a service that has too little memory for it, and the queue that drains.

Sixty requests at once, each with 32 MiB of arrays, on a service with 128 MiB. The first four are served; the others
wait in line, in the order in which they came, and none is refused. Each line is a moment: what is in use and reserved,
who waits, who was served. Exit status 0: all were served, and the arrays never held more than there was;
1: otherwise.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import numpy as np

import ctxalloc
from ctxalloc import Budget, MiB
from ctxalloc.asgi import AllocatorMiddleware

SERVICE: Final = Budget(128 * MiB, name="service")
NEEDED: Final = 32 * MiB
WIDTH: Final = 60

served: list[int] = []


async def app(scope: MutableMapping[str, Any], _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    """Works on an array for a moment."""
    pixels = np.ones(NEEDED - 4096, np.uint8)  # and room for what sums of it take
    await asyncio.sleep(0.1)
    assert pixels.all()
    served.append(int(scope["path"].rpartition("/")[2]))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def ask(service: Any, number: int) -> int:
    """One client; the status of its answer."""
    messages = [{"type": "http.request", "body": b"", "more_body": False}]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()  # it stays until it has its answer
        return messages.pop()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await service({"type": "http", "method": "GET", "path": f"/work/{number}", "headers": []}, receive, send)
    return statuses[0]


def line(begun: float) -> str:
    """This moment."""
    in_use = SERVICE.in_use_bytes + SERVICE.reserved_bytes
    bar = "#" * SERVICE.waiting + "." * (WIDTH - SERVICE.waiting)
    seconds = time.monotonic() - begun
    return f"{seconds:5.1f} s  {in_use // MiB:4} MiB  {SERVICE.waiting:3} wait  {len(served):3} served  {bar[:WIDTH]}"


async def main() -> int:
    """Sends the burst, shows the queue, judges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=WIDTH, help="of the burst (%(default)s)")
    requests = parser.parse_args().requests
    terms = ctxalloc.request(budget=SERVICE, reserve_bytes=NEEDED, timeout=60)
    service = AllocatorMiddleware(app, routes={"/work/{number}": terms})
    begun = time.monotonic()
    clients = asyncio.gather(*(ask(service, number) for number in range(requests)))
    while not clients.done():
        await asyncio.sleep(0.1)
        print(line(begun), flush=True)
    statuses = await clients
    series = ctxalloc.metrics.snapshot().series["/work/{number}"]
    waited = series.waited_micros
    print(f"{waited.count} waited, half of them up to {waited.quantile(0.5) / 1e6:.1f} s; the peak was", end=" ")
    print(f"{SERVICE.peak_bytes // MiB} of {128} MiB")
    is_well = statuses == [200] * requests and SERVICE.peak_bytes <= 128 * MiB and series.timed_out == 0
    return 0 if is_well else 1
