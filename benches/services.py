"""What `ctxalloc.asgi.AllocatorMiddleware` costs: around an empty application, and behind uvicorn on a NumPy route.

The first table is CPU time of one call, no server, every variant in turn, round after round; the middleware's own share
is its median less the empty application's (aim: 3 us). Next come paths that strangers choose. The last is uvicorn in a
process of its own, asked by clients on connections that stay open; with and without take turns, medians are compared
(aim: 5 % of throughput and p99; beside them the server's CPU time of one request, which others disturb less): a route
of half a dozen arrays of 800 kB, and a light one, the same with 8 kB. "Passed on" is a middleware that has a scope and
a `send` of its own and does nothing: what one in Python costs.
Numbers go to target/bench/services.json. Options: --rounds N, --quick.
"""

import argparse
import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Loop, Row, keep, machine, medians, table
from harness.served import ROUTE, SIZES, Application, http_scope, multiplies
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import ctxalloc
from ctxalloc.asgi import AllocatorMiddleware

AIM_OWN_NS = 3000.0
CLIENTS = 8


async def passing(scope: Any, receive: Any, send: Any) -> None:
    """A middleware that does nothing."""

    async def sends(message: Any) -> None:
        await send(message)

    await multiplies({**scope}, receive, sends)


async def empty(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def calls(app: Application, path: str = "/multiply/1") -> Loop:
    """CPU time of one call."""
    scope = http_scope(path)

    async def receive() -> Any: ...

    async def send(message: Any) -> None: ...

    async def run(count: int) -> float:
        begun = time.process_time()
        for _ in range(count):
            await app(scope, receive, send)
        return (time.process_time() - begun) / count * 1e9

    return lambda count: asyncio.run(run(count))


def alone(rounds: int) -> dict[str, Row]:
    """The middleware around an application that does nothing."""
    tenant = ctxalloc.Budget(1 << 30, parent=ctxalloc.Budget(1 << 40))
    terms: Any = {ROUTE: ctxalloc.request(limit_bytes=1 << 30)}
    variants = {
        "no middleware": calls(empty),
        "a handler": calls(AllocatorMiddleware(empty, default="pool")),
        "an account": calls(AllocatorMiddleware(empty)),
        "a route, a limit and a tenant": calls(AllocatorMiddleware(empty, routes=terms, tenant=lambda _: tenant)),
        "the same, and on_end": calls(
            AllocatorMiddleware(empty, routes=terms, tenant=lambda _: tenant, on_end=lambda *_: None)
        ),
    }
    rows = medians(variants, rounds, 2000)
    table("one call of an empty application, CPU time", rows, "no middleware")
    return rows


HOSTILE = "/report/{year}-{month}-{day}"


def hostile(rounds: int) -> dict[str, Row]:
    """Paths that strangers choose: our matcher, and Starlette with the same route."""
    terms: Any = {HOSTILE: ctxalloc.request(limit_bytes=1 << 30)}
    framework = Starlette(routes=[Route(HOSTILE, PlainTextResponse(""))])
    short, dashes, long = "/report/2026-1-2", "/report/" + "-" * 300 + "/", "/report/" + "-" * 5000 + "/"
    guarded, asking = AllocatorMiddleware(empty, routes=terms), AllocatorMiddleware(framework, routes=terms)
    rows = medians({"a date": calls(guarded, short), "5000 dashes": calls(guarded, long)}, rounds, 500)
    table("a route of three parameters in a segment, before an empty application", rows, "a date")
    beside = medians(
        {
            "Starlette, 300 dashes": calls(framework, dashes),
            "the same, and the middleware": calls(asking, dashes),
        },
        max(3, rounds // 4),
        2,
    )
    table("before Starlette, whose own regular expression takes cubic time", beside, "Starlette, 300 dashes")
    return {**rows, **beside}


@contextlib.contextmanager
def served(app: str) -> Iterator[tuple[int, int]]:
    """The bench's own application on uvicorn; a port and a process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        command = [sys.executable, __file__, "--serve", app, "--socket", str(listening.fileno())]
        with subprocess.Popen(command, pass_fds=[listening.fileno()]) as process:
            try:
                yield port, process.pid
            finally:
                process.terminate()


async def load(port: int, size: int, requests: int) -> tuple[float, float]:
    """Requests in a second, and p99 in milliseconds."""
    latencies: list[float] = []
    ask = f"GET /multiply/{size} HTTP/1.1\r\nhost: bench\r\n\r\n".encode()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests // CLIENTS):
            begun = time.perf_counter()
            writer.write(ask)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
            latencies.append(time.perf_counter() - begun)
        writer.close()
        await writer.wait_closed()

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seconds = time.perf_counter() - begun
    return len(latencies) / seconds, float(np.percentile(latencies, 99)) * 1e3


def behind_a_server(route: str, rounds: int, requests: int) -> dict[str, dict[str, float]]:
    """With and without, in turn."""
    found: dict[str, list[tuple[float, float, float]]] = {"bare": [], "passed on": [], "guarded": []}
    with contextlib.ExitStack() as running:
        servers = {name: running.enter_context(served(name)) for name in found}
        for port, _ in servers.values():
            asyncio.run(load(port, SIZES[route], requests // 4))
        for _ in range(rounds):
            for name, (port, process) in servers.items():
                before = cpu_seconds(process)
                rate, p99 = asyncio.run(load(port, SIZES[route], requests))
                found[name].append((rate, p99, (cpu_seconds(process) - before) / requests * 1e6))
    rows = {
        name: dict(
            zip(
                ("requests_per_second", "p99_ms", "cpu_us"),
                map(statistics.median, zip(*measured, strict=True)),
                strict=True,
            )
        )
        for name, measured in found.items()
    }
    print(f"\n{f'uvicorn, {route}':28}{'requests/s':>12}{'p99 ms':>9}{'CPU us':>9}")
    for name, row in rows.items():
        print(f"{name:28}{row['requests_per_second']:12.0f}{row['p99_ms']:9.2f}{row['cpu_us']:9.1f}")
    return rows


def cpu_seconds(process: int) -> float:
    """What the threads of a process have used, to the nanosecond."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(thread.read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


def serve(which: str, descriptor: int) -> None:
    """The server's side."""
    import uvicorn  # noqa: PLC0415 - the other side does without

    guarded = AllocatorMiddleware(multiplies, routes={ROUTE: ctxalloc.request(limit_bytes=1 << 30)})
    app: Any = {"bare": multiplies, "passed on": passing, "guarded": guarded}[which]
    options: dict[str, Any] = {"lifespan": "off", "access_log": False, "log_level": "warning", "loop": "asyncio"}
    # Not `fd=`: uvicorn takes that for a socket of the file system, without TCP_NODELAY, and each answer waits 40 ms.
    uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[socket.socket(fileno=descriptor)])


def main() -> int:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41, help="how often each variant has its turn")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    parser.add_argument("--serve", choices=["bare", "passed on", "guarded"], help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.socket)
        return 0
    rounds = 5 if options.quick else options.rounds
    print(f"{machine()}; {rounds} rounds, medians")
    rows = alone(rounds)
    base = rows["no middleware"]["median_ns"]
    for name, row in rows.items():
        print(f"{name:44}{(row['median_ns'] - base) / 1000:6.2f} us of its own")
    strange = hostile(rounds)
    server = {route: behind_a_server(route, max(3, rounds // 4), 400 if options.quick else 2000) for route in SIZES}
    keep("services", {"rounds": rounds, "alone": rows, "hostile": strange, "server": server})
    return 0


if __name__ == "__main__":
    sys.exit(main())
