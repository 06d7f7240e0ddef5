"""Memory of a service through a burst and after it: uvicorn, requests of ten arrays of 100 B to 8 MiB in threads.

Every peer is a process of its own under the same load: a second at rest, `--requests` requests from sixteen clients,
`--rest` seconds with four small requests a second. Some small arrays stay in a cache, so that the heap has
holes, as it has in a service. RSS is what the kernel says of the process, twenty times a second, beyond what it was
before the burst. The peers: NumPy's default; the same with `malloc_trim(0)` once a second, by a timer; jemalloc
preloaded, as it comes and with its background thread; `ctxalloc.asgi.AllocatorMiddleware`, as it comes. Numbers go to
target/bench/burst.json, the picture to target/bench/burst.png. Options: --requests N, --rest N, --quick, --picture
PATH.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import keep, machine
from harness.peers import found_preloads

CLIENTS: Final = 16
ARRAYS: Final = 10
MIN, MAX = 100, 8 << 20
CACHED_BYTES: Final = 64 << 10
"""Arrays up to this size go to the cache, one in ten of them."""
CACHE: Final = 500
BEFORE_S: Final = 1.0
SAMPLE_S: Final = 0.05
PAGE_MIB: Final = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
OURS: Final = "ctxalloc.asgi"
COLOURS: Final = ["#8a8f98", "#c98b2b", "#b0413e", "#7a4fa3"]


@dataclass
class Peer:
    """Who serves the load."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    kind: str = "bare"
    """What the server's side does: `bare`, `trim` or `ours`."""


@dataclass
class Seen:
    """What was seen of a peer."""

    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the burst's end, MiB beyond what there was."""
    latencies_s: list[float] = field(default_factory=list)
    burst_s: float = 0.0


# ---- the server's side --------------------------------------------------------------------------------------------

cache: deque[np.ndarray[Any, Any]] = deque(maxlen=CACHE)


def work(number: int) -> int:
    """One request's arrays: the same for every peer."""
    draw = random.Random(number)
    made = [np.full(round(MIN * (MAX / MIN) ** draw.random()), 1, np.uint8) for _ in range(ARRAYS)]
    cache.extend(array for array in made if array.nbytes <= CACHED_BYTES and draw.random() < 0.1)
    return sum(int(array[-1]) for array in made)


async def app(scope: Any, _receive: Any, send: Any) -> None:
    """`/sums/NUMBER` works in a thread, `/rest` makes one small array."""
    _, kind, *number = scope["path"].split("/")
    done = await asyncio.to_thread(work, int(number[0])) if kind == "sums" else int(np.ones(100).sum())
    body = str(done).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def trim_every_second() -> None:
    """The timer of services that have one."""
    libc = ctypes.CDLL("libc.so.6")

    def trim() -> None:
        while True:
            time.sleep(1)
            libc.malloc_trim(0)

    threading.Thread(target=trim, daemon=True).start()


def serve(kind: str, descriptor: int) -> None:
    """The service of one peer, until it is terminated."""
    import uvicorn  # noqa: PLC0415 - the other side does without

    service: Any = app
    if kind == "ours":
        from ctxalloc.asgi import AllocatorMiddleware  # noqa: PLC0415 - the others are to stand without

        service = AllocatorMiddleware(app)
    elif kind == "trim":
        trim_every_second()
    options: dict[str, Any] = {
        "lifespan": "off",
        "access_log": False,
        "log_level": "warning",
        "loop": "asyncio",
        "timeout_keep_alive": 60,
    }
    # Not `fd=`: uvicorn takes that for a socket of the file system, without TCP_NODELAY, and each answer waits 40 ms.
    uvicorn.Server(uvicorn.Config(service, **options)).run(sockets=[socket.socket(fileno=descriptor)])


# ---- the load -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(peer: Peer) -> Iterator[tuple[int, int]]:
    """The peer's service: its port and its process."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "MALLOC_CONF")}
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        command = [sys.executable, __file__, "--serve", peer.kind, "--socket", str(listening.fileno())]
        with subprocess.Popen(
            command, pass_fds=[listening.fileno()], env={**environment, **peer.environment}
        ) as process:
            try:
                yield listening.getsockname()[1], process.pid
            finally:
                process.terminate()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
    """One request on a connection that stays open."""
    writer.write(f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))


def rss_mib(process: int) -> float:
    """What a process has in memory."""
    return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * PAGE_MIB


async def load(port: int, process: int, requests: int, rest_s: float) -> Seen:
    """The whole load on one service."""
    seen = Seen()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await ask(reader, writer, "/sums/0")
    await asyncio.sleep(BEFORE_S)
    before, begun = rss_mib(process), time.perf_counter()

    async def watch() -> None:
        while True:
            seen.memory.append((time.perf_counter() - begun, rss_mib(process) - before))
            await asyncio.sleep(SAMPLE_S)

    numbers = iter(range(1, requests + 1))

    async def client() -> None:
        own_reader, own_writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            asked = time.perf_counter()
            await ask(own_reader, own_writer, f"/sums/{number}")
            seen.latencies_s.append(time.perf_counter() - asked)
        own_writer.close()
        await own_writer.wait_closed()

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seen.burst_s = time.perf_counter() - begun
    until = time.perf_counter() + rest_s
    while time.perf_counter() < until:
        await ask(reader, writer, "/rest")
        await asyncio.sleep(0.25)
    watching.cancel()
    seen.memory = [(at - seen.burst_s, mib) for at, mib in seen.memory]
    writer.close()
    return seen


def peers() -> list[Peer]:
    """The first is what the ratios refer to; ours is the last."""
    found = found_preloads()
    preloaded = []
    if "jemalloc" in found:
        environment = {"LD_PRELOAD": found["jemalloc"]}
        background = {**environment, "MALLOC_CONF": "background_thread:true"}
        preloaded = [Peer("jemalloc", environment), Peer("jemalloc, background thread", background)]
    return [Peer("NumPy's default"), Peer("malloc_trim each second", kind="trim"), *preloaded, Peer(OURS, kind="ours")]


def row_of(seen: Seen, rest_s: float) -> dict[str, float]:
    """The numbers of one peer."""
    last_second = [mib for at, mib in seen.memory if at > rest_s - 1]
    return {
        "requests_per_second": len(seen.latencies_s) / seen.burst_s,
        "p99_ms": float(np.percentile(seen.latencies_s, 99)) * 1e3,
        "highest_mib": max(mib for _, mib in seen.memory),
        "after_mib": statistics.mean(last_second),
    }


def draw(path: Path, found: dict[str, Seen]) -> None:
    """Memory over time, a line for each peer."""
    import matplotlib as mpl  # noqa: PLC0415 - the servers do not draw

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    colours = iter(COLOURS)
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure, panel = plt.subplots(figsize=(12, 4.6), layout="constrained")
        for name, seen in found.items():
            is_ours = name == OURS
            colour = "#2f6f9f" if is_ours else next(colours)
            width = 2.6 if is_ours else 1.2
            panel.plot(*zip(*seen.memory, strict=True), label=name, color=colour, linewidth=width)
        panel.axvline(0, color="#5f6b78", linewidth=0.8, linestyle=":")
        panel.set(
            title="Memory of a service beyond what it had before, through a burst and after it",
            xlabel="seconds since the burst ended",
            ylabel="MiB",
            ylim=(0, None),
        )
        panel.legend(frameon=False)
        figure.savefig(path, dpi=110)


def main() -> int:
    """Measures, prints, keeps and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of the burst (%(default)s)")
    parser.add_argument("--rest", type=float, default=16, help="seconds after it; the decay is ten (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few requests, two seconds after: does it run?")
    parser.add_argument("--picture", type=Path, help="where the picture goes besides target/bench")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.socket)
        return 0
    requests, rest_s = (100, 2.0) if options.quick else (options.requests, options.rest)
    print(f"{machine()}; {CLIENTS} clients, {requests} requests and {rest_s:g} s after them\n")
    print(f"{'':28}{'requests/s':>12}{'p99 ms':>9}{'highest MiB':>13}{'after MiB':>11}")
    found: dict[str, Seen] = {}
    rows: dict[str, dict[str, float]] = {}
    for peer in peers():
        with served(peer) as (port, process):
            found[peer.name] = seen = asyncio.run(load(port, process, requests, rest_s))
        rows[peer.name] = row = row_of(seen, rest_s)
        print(
            f"{peer.name:28}{row['requests_per_second']:12.0f}{row['p99_ms']:9.1f}{row['highest_mib']:13.0f}"
            f"{row['after_mib']:11.1f}",
            flush=True,
        )
    place = keep("burst", {"requests": requests, "rest_s": rest_s, "burst": rows})
    for path in [place.with_suffix(".png"), *filter(None, [options.picture])]:
        draw(path, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
