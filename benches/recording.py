"""What recording costs a service: CPU time of a request of `ctxalloc.asgi.AllocatorMiddleware` with six arrays.

Not recording, recording one request in ten (aim: 3 % of a service's throughput), every one, and not recording again, in
one process and in turn, round after round; medians are compared. The share of the time that recording may take is not
looked at: that would hide what it costs. Numbers go to target/bench/recording.json. Options: --rounds N, --quick.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Loop, Row, keep, medians, rounds_asked, table

import ctxalloc
from ctxalloc.asgi import AllocatorMiddleware

SIZES = {"six arrays of 800 kB": 100_000, "six arrays of 8 kB": 1000}
BASE = "not recording"


async def multiplies(scope: Any, _receive: Any, send: Any) -> None:
    first = np.arange(scope["size"], dtype=np.float64)
    for _ in range(3):
        first = np.sqrt(first * first + 1.0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%f" % float(first[-1])})


@contextlib.contextmanager
def recorded(one_in: int | None) -> Iterator[None]:
    if one_in is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, ctxalloc.record(Path(folder) / "trace", one_in=one_in, share=1.0):
        yield


def calls(size: int, one_in: int | None) -> Loop:
    app = AllocatorMiddleware(multiplies)
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/multiply",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "size": size,
    }

    async def receive() -> Any: ...

    async def send(message: Any) -> None: ...

    async def run(count: int) -> float:
        begun = time.process_time()
        for _ in range(count):
            await app(dict(scope), receive, send)
        return (time.process_time() - begun) / count * 1e9

    def run_all(count: int) -> float:
        with recorded(one_in):
            return asyncio.run(run(count))

    return run_all


def main() -> None:
    rounds = rounds_asked(__doc__)
    kept: dict[str, dict[str, Row]] = {}
    for title, size in SIZES.items():
        variants = {BASE: None, "one request in ten": 10, "every request": 1, "not recording, once more": None}
        rows = medians(
            {name: calls(size, one_in) for name, one_in in variants.items()}, rounds, 200 if size > 10_000 else 2000
        )
        table(f"a request with {title}", rows, BASE)
        kept[title] = rows
    keep("recording", {"services": kept})


if __name__ == "__main__":
    main()
