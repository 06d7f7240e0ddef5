"""A service whose requests wait in line, for test_waiting_clients.py.

`/work` works until `/release`; its answer says how long its body was. `/collect` collects garbage. `/counts` tells who
waits, who is in, and how requests ended.
"""

import asyncio
import gc
import json
from collections import Counter
from typing import Any

import ctxalloc
from ctxalloc import MiB
from ctxalloc.asgi import AllocatorMiddleware, Report, Scope

budget = ctxalloc.Budget(100 * MiB, name="one at a time")
ends: Counter[str] = Counter()
counts: Counter[str] = Counter()
released = asyncio.Event()


def on_end(_: Scope, report: Report) -> None:
    ends[report.outcome] += 1


async def length_of_body(receive: Any) -> int:
    length = 0
    while True:
        message = await receive()
        length += len(message.get("body", b""))
        if not message.get("more_body"):
            return length


async def work(receive: Any) -> bytes:
    counts["working"] += 1
    await released.wait()
    return b"%d" % await length_of_body(receive)


async def application(scope: Scope, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (kind := (await receive())["type"]) != "lifespan.shutdown":
            await send({"type": f"{kind}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = b""
    if scope["path"] == "/work":
        body = await work(receive)
    elif scope["path"] == "/collect":
        for _ in range(3):
            gc.collect()
    elif scope["path"] == "/release":
        released.set()
    elif scope["path"] == "/counts":
        body = json.dumps({"waiting": budget.waiting, "working": counts["working"], "ends": ends}).encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


terms = ctxalloc.request(budget=budget, reserve_bytes=60 * MiB)
service = AllocatorMiddleware(application, routes={"/work": terms}, default=None, on_end=on_end)
