"""Records a service, asks for advice, follows it, and measures the service again beside NumPy's default.

    python examples/tune/advised_service.py --requests 200 --rounds 5

The service is an ASGI application of three routes, called without a network: pictures are scaled (blocks of some MiB),
tables summed (many blocks below 256 KiB) and a token made (nothing to gain). The work runs in threads, as frameworks do
it for functions that are no coroutines, and several clients ask at a time (`--clients 1`: one after the other). Each
measurement is a process of its own, and the two kinds alternate. It prints the advice, and for both the processor time,
page faults and the largest RSS.
"""

import argparse
import asyncio
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ctxalloc
from ctxalloc import strategies
from ctxalloc.asgi import AllocatorMiddleware

ROUTES = ("POST /scale", "GET /table", "GET /token")


def scaled() -> float:
    """A picture of 1500 x 1500 in three colours, blurred and scaled down."""
    picture = np.ones((1500, 1500, 3), np.float32)
    blurred = (picture[:-1] + picture[1:]) / 2
    small = blurred[::2, ::2] * 0.9 + 0.1
    return float(np.clip(small, 0, 1).mean())


def summed() -> float:
    """A table of 60 columns of 20,000 numbers, each centred."""
    columns = [np.arange(20_000, dtype=np.float64) for _ in range(60)]
    return float(sum((column - column.mean()).std() for column in columns))


def token() -> str:
    """Nothing of NumPy's but a few bytes."""
    seed = np.arange(16, dtype=np.uint8).tobytes()
    for _ in range(2000):
        seed = hashlib.sha256(seed).digest()
    return seed.hex()


WORK = {"/scale": scaled, "/table": summed, "/token": token}


async def service(scope: Any, _receive: Any, send: Any) -> None:
    """The application."""
    body = str(await asyncio.to_thread(WORK[scope["path"]])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def load(app: Any, requests: int, clients: int) -> None:
    """Each client makes its requests one after the other, the routes in turn, and each begins with another route."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message

    async def client(first: int) -> None:
        for number in range(first, first + requests // clients):
            method, path = ROUTES[number % len(ROUTES)].split()
            scope = {
                "type": "http",
                "method": method,
                "path": path,
                "headers": [],
                "query_string": b"",
                "scheme": "http",
            }
            await app(scope, receive, send)

    await asyncio.gather(*(client(first) for first in range(clients)))


def measured(kind: str, requests: int, clients: int, folder: Path) -> None:
    """Serves in this process; prints the processor time and the resident memory that it took."""
    app: Any = service
    if kind == "recorded":
        # As it is: the C heap, which NumPy's default takes its memory from. Advice begins with what was recorded.
        terms = ctxalloc.request(strategy=strategies.System())
        with ctxalloc.record(folder / "service.trace", one_in=1, share=1.0):
            app = AllocatorMiddleware(app, routes=dict.fromkeys(ROUTES, terms))
            for each in (1, clients):  # what a request waits for shows where it runs by itself
                asyncio.run(load(app, requests // 2, each))
    else:
        if kind == "advised":
            names: dict[str, Any] = {"app": app}
            exec((folder / "advice.py").read_text(), names)  # noqa: S102 - what is to be pasted
            app = names["app"]
        asyncio.run(load(app, requests, clients))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([used.ru_utime + used.ru_stime, used.ru_minflt, used.ru_maxrss * 1024]))


def main() -> None:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description="Record, recommend, apply, measure.")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind is not None:
        measured(options.kind, options.requests, options.clients, options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:

        def one(kind: str) -> list[float]:
            words = ["--kind", kind, "--folder", folder]
            words += ["--requests", str(options.requests), "--clients", str(options.clients)]
            done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE)
            found: list[float] = json.loads(done.stdout)
            return found

        one("recorded")
        words = ["-m", "ctxalloc", "recommend", f"{folder}/service.trace", "--rounds", str(options.rounds), "--json"]
        told = json.loads(subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE).stdout)
        for route in told["routes"]:
            print(f"{route['route']:12} {route['verdict']:8} {route['strategy']:10} {route['reason']}")
        if told["at_once"] is not None:
            print(f"at once: {told['at_once']['reason']}")
        (Path(folder) / "advice.py").write_text(told["snippets"]["python"])
        rounds = [(one("default"), one("advised")) for _ in range(options.rounds)]
        for at, what, unit in ((0, "processor time", 1.0), (1, "page faults", 1.0), (2, "largest RSS, MiB", 1 << 20)):
            before, after = ([pair[kind][at] / unit for pair in rounds] for kind in (0, 1))
            medians = statistics.median(before), statistics.median(after)
            spread = f"{min(before):.4g} to {max(before):.4g}, and {min(after):.4g} to {max(after):.4g}"
            print(f"{what:18} {medians[0]:.4g} -> {medians[1]:.4g}  ({medians[1] / medians[0]:.2f}x; {spread})")


if __name__ == "__main__":
    main()
