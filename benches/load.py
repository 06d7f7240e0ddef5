"""Memory that a process keeps after a load like a service's: arrays of 100 B to 32 MiB, one in fifty kept for a minute.

A request makes `ARRAYS` arrays, sizes even on a logarithmic scale, each filled; all go at its end but one in fifty,
which lives for `MINUTE` requests. Every peer runs the same requests in a process of its own. RSS is what the kernel
says (/proc/self/statm, MiB): at its highest after a request, after the last one with the kept arrays alive, and after
those went too. Numbers go to target/bench/load.json. Options: --requests N, --quick.
"""

import argparse
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import keep, machine
from harness.peers import NUMPY_ALLOCATOR, Peer, Process, found_preloads, selection

ARRAYS: Final = 10
MINUTE: Final = 500
KEPT: Final = 1 / 50
MIN, MAX = 100, 32 << 20
DEFAULT: Final = "NumPy's default"
PAGE_MIB: Final = 4096 / (1 << 20)


def rss_mib() -> float:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_MIB


def one_request(draw: random.Random, handler: str | None) -> list[np.ndarray[Any, Any]]:
    """Makes the arrays; returns those that are kept."""
    made: list[np.ndarray[Any, Any]] = []
    with selection(handler):
        for _ in range(ARRAYS):
            size = round(MIN * (MAX / MIN) ** draw.random())
            made.append(np.full(size, 1, np.uint8))
    return [array for array in made if draw.random() < KEPT]


def run(question: dict[str, Any]) -> dict[str, float]:
    """The worker's side: the whole load."""
    draw = random.Random(question["seed"])  # the same load for everybody
    before, highest = rss_mib(), 0.0
    kept: deque[list[np.ndarray[Any, Any]]] = deque(maxlen=MINUTE)
    begun = time.perf_counter()
    for number in range(question["requests"]):
        kept.append(one_request(draw, question["handler"]))
        if number % 16 == 0:
            highest = max(highest, rss_mib())
    seconds = time.perf_counter() - begun
    alive = sum(array.nbytes for arrays in kept for array in arrays) / (1 << 20)
    after = rss_mib()
    kept.clear()
    return {
        "seconds": seconds,
        "alive_mib": alive,
        "highest_mib": highest - before,
        "after_mib": after - before,
        "emptied_mib": rss_mib() - before,
    }


def peers() -> list[Peer]:
    """Who carries the load; the first is what the ratios refer to."""
    ours = [Peer(name, handler=name) for name in ("system", "pool")]
    preloaded = [Peer(f"{name}, preloaded", preload=path) for name, path in found_preloads().items()]
    return [Peer(DEFAULT), *ours, Peer(NUMPY_ALLOCATOR, handler=NUMPY_ALLOCATOR), *preloaded]


def main() -> int:
    """Runs the load, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="how many requests each peer serves")
    parser.add_argument("--quick", action="store_true", help="few requests: does it run?")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        Process.serve(run)
        return 0
    requests = 50 if options.quick else options.requests
    print(f"{machine()}; {requests} requests of {ARRAYS} arrays")
    rows: dict[str, dict[str, float]] = {}
    titles = f"{'highest':>10}{'after':>10}{'ratio':>8}{'emptied':>10}{'alive':>8}{'seconds':>9}{'ratio':>8}"
    print(f"\n{'RSS in MiB':28}{titles}")
    for peer in peers():
        with Process(__file__, peer.preload) as process:
            rows[peer.name] = row = process.ask({"handler": peer.handler, "requests": requests, "seed": 1})
        base = rows[DEFAULT]
        print(
            f"{peer.name:28}{row['highest_mib']:10.0f}{row['after_mib']:10.0f}"
            f"{row['after_mib'] / base['after_mib']:7.2f}x{row['emptied_mib']:10.0f}{row['alive_mib']:8.0f}"
            f"{row['seconds']:9.1f}{row['seconds'] / base['seconds']:7.2f}x",
            flush=True,
        )
    keep("load", {"requests": requests, "load": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
