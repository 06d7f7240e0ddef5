"""A service at twice its memory's capacity: three tenants, of which one floods.

Each way of admission has the same arrivals (Poisson, by a seed), the same applications and a process of its own: ASGI
calls without sockets. Two patient tenants send small requests, a tenth of what the service has memory for each; the
third one sends large ones, nine fifths of it. A client gives up after three seconds; what ends within them is goodput.
Memory is what arrays held at most at one time, by a budget without a limit that all are charged to.

The reservations are what a route needs, so that the figures tell of queues, not of estimates. Numbers go to
target/bench/overload.json, the picture beside it. Options: --seconds S, --quick, --picture PATH. It takes six times the
seconds, and a few more.

--group: each way runs in a control group that has room for the service's memory and Python's, every page is written,
and it is told which ways are killed. Nothing is kept then. It needs a control group that this user may make.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from harness import keep, machine

import ctxalloc
from ctxalloc import Budget, MiB
from ctxalloc.asgi import AllocatorMiddleware

CAPACITY: Final = 256 * MiB
BESIDE: Final = 192 * MiB
"""What a control group has for Python, NumPy and what the pool keeps warm."""
GIVES_UP: Final = 3.0
"""Seconds until a client goes."""
SEED: Final = 24


class Kind(NamedTuple):
    """What a tenant sends."""

    path: str
    size_bytes: int
    hold_seconds: float
    max_waiting: int
    """How many of them may wait."""
    load: float
    """Part of the service's capacity: bytes times seconds, a second."""

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.load * CAPACITY / (self.size_bytes * self.hold_seconds)


SMALL: Final = Kind("/small", 4 * MiB, 0.4, 100, 0.1)
LARGE: Final = Kind("/large", 48 * MiB, 0.8, 6, 1.8)
TENANTS: Final = {"patient 1": SMALL, "patient 2": SMALL, "flood": LARGE}
WAYS: Final = {
    "nothing": "no limit",
    "semaphore": "a semaphore by count",
    "refuse": "one limit, refused at once",
    "refuse tenants": "limits by tenant, refused at once",
    "wait": "one limit, waiting",
    "wait tenants": "limits by tenant, waiting",
}


class Answer(NamedTuple):
    """One request of a client."""

    tenant: str
    began: float
    status: int | None
    """None: the client gave up."""
    seconds: float


async def app(scope: MutableMapping[str, Any], _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    """Holds an array for a while."""
    kind = SMALL if scope["path"] == SMALL.path else LARGE
    held = np.empty(kind.size_bytes, np.uint8)
    held[:: 4096 if os.environ.get("EACH_PAGE") else MiB] = 1  # not each: what is measured is no page faults
    await asyncio.sleep(kind.hold_seconds)
    del held
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def service(way: str) -> tuple[Any, Budget]:
    """The application behind one way of admission, and the budget that all is charged to."""
    counted = Budget(name="counted")
    is_limited, is_by_tenant, waits = way.startswith(("refuse", "wait")), "tenants" in way, way.startswith("wait")
    process = Budget(CAPACITY if is_limited else None, parent=counted, name="process")
    # The patient ones need a fifth of it; the flood has to do with the rest.
    limits = {"flood": CAPACITY * 5 // 8} if is_by_tenant else {}
    tenants = {name: Budget(limits.get(name), parent=process, name=name) for name in TENANTS}

    def terms(kind: Kind) -> ctxalloc.Request:
        if waits:
            # Who would get room too late for its client is better refused.
            return ctxalloc.request(
                reserve_bytes=kind.size_bytes, timeout=GIVES_UP - 1.5 * kind.hold_seconds, max_waiting=kind.max_waiting
            )
        return ctxalloc.request()

    routes: dict[str, Any] = {kind.path: terms(kind) for kind in (SMALL, LARGE)}
    guarded = AllocatorMiddleware(app, routes=routes, tenant=lambda scope: tenants[scope["tenant"]])
    if way != "semaphore":
        return guarded, counted
    mean = sum(kind.size_bytes * kind.rate for kind in TENANTS.values()) / sum(kind.rate for kind in TENANTS.values())
    places = asyncio.Semaphore(int(CAPACITY / mean))

    async def by_count(scope: Any, receive: Any, send: Any) -> None:
        async with places:
            await guarded(scope, receive, send)

    return by_count, counted


def arrivals(seconds: float) -> list[tuple[float, str]]:
    """When who sends one."""

    def of(name: str, kind: Kind) -> Iterator[tuple[float, str]]:
        chance = random.Random(f"{SEED} {name}")
        at = chance.expovariate(kind.rate)
        while at < seconds:
            yield at, name
            at += chance.expovariate(kind.rate)

    return sorted(one for name, kind in TENANTS.items() for one in of(name, kind))


async def send_all(way: str, seconds: float) -> tuple[list[Answer], int, list[tuple[float, float]]]:
    """All arrivals; the answers, the most bytes, and what was held over time in MiB."""
    asked, counted = service(way)
    answers: list[Answer] = []
    held: list[tuple[float, float]] = []
    begun = time.perf_counter()

    async def one(tenant: str) -> None:
        scope = {"type": "http", "method": "GET", "path": TENANTS[tenant].path, "headers": [], "tenant": tenant}
        status: list[int] = []
        stays = asyncio.Event()
        has_asked = False

        async def receive() -> dict[str, Any]:
            nonlocal has_asked
            if has_asked:
                await stays.wait()
            has_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])

        at = time.perf_counter()
        try:
            await asyncio.wait_for(asked(scope, receive, send), GIVES_UP)
        except (TimeoutError, MemoryError):
            status.clear()
        answers.append(Answer(tenant, at - begun, status[0] if status else None, time.perf_counter() - at))

    async def watch() -> None:
        while True:
            held.append((time.perf_counter() - begun, counted.in_use_bytes / MiB))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    tasks = []
    for at, tenant in arrivals(seconds):
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(tenant)))
    await asyncio.gather(*tasks)
    watching.cancel()
    return answers, counted.peak_bytes, held


def row_of(answers: list[Answer], peak_bytes: int, seconds: float) -> dict[str, float]:
    """The numbers of one way. The first quarter, in which it fills up, counts for memory only."""
    counted = [one for one in answers if one.began >= seconds / 4]
    patient = [one for one in counted if one.tenant != "flood"]
    flood = [one for one in counted if one.tenant == "flood"]
    good = [one for one in counted if one.status == 200]
    times = sorted(one.seconds for one in patient if one.status == 200) or [float("nan")] * 2
    time_held = sum(TENANTS[one.tenant].size_bytes * TENANTS[one.tenant].hold_seconds for one in good)

    def part(of: list[Answer], *status: int | None) -> float:
        return sum(one.status in status for one in of) / max(1, len(of))

    return {
        "goodput_per_second": len(good) / (seconds * 3 / 4),
        "goodput_of_capacity": time_held / (CAPACITY * seconds * 3 / 4),
        "patient_served": part(patient, 200),
        "patient_p50_ms": statistics.median(times) * 1e3,
        "patient_p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))] * 1e3,
        "flood_served": part(flood, 200),
        "refused": part(counted, 413, 429, 503),
        "gave_up": part(counted, None),
        "peak_mib": peak_bytes / MiB,
    }


def draw(path: Path, rows: dict[str, dict[str, float]], held: dict[str, list[tuple[float, float]]]) -> None:
    """Memory over time; who was served; how long the patient ones took."""
    import matplotlib as mpl  # noqa: PLC0415 - the measured processes do not draw

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    colours = {way: f"C{number}" for number, way in enumerate(rows)}
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure, panels = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained", width_ratios=(2, 1.2, 1.2))
        for way, points in held.items():
            panels[0].plot(*zip(*points, strict=True), color=colours[way], linewidth=1.2, label=WAYS[way])
        panels[0].axhline(CAPACITY / MiB, color="#5f6b78", linewidth=0.8, linestyle=":")
        panels[0].set(title="arrays alive, MiB (dotted: what there is)", xlabel="seconds", ylim=(0, None))
        lines, names = panels[0].get_legend_handles_labels()
        figure.legend(lines, names, frameon=False, loc="outside lower center", ncols=len(rows))
        labels = [WAYS[way] for way in rows]
        places = np.arange(len(rows))
        for shift, (key, label, colour) in enumerate(
            (("patient_served", "patient", "#2f6f9f"), ("flood_served", "flood", "#c8733a"))
        ):
            served = [100 * row[key] for row in rows.values()]
            panels[1].barh(places + 0.38 * shift, served, height=0.36, color=colour, label=label)
        panels[1].set_yticks(places + 0.19, labels)
        panels[1].set(title="requests served in time, %", xlim=(0, 100))
        panels[1].invert_yaxis()
        panels[1].legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=2)
        for shift, (key, label, colour) in enumerate(
            (("patient_p50_ms", "p50", "#9dbfd6"), ("patient_p99_ms", "p99", "#2f6f9f"))
        ):
            times = [row[key] for row in rows.values()]
            panels[2].barh(places + 0.38 * shift, times, height=0.36, color=colour, label=label)
        panels[2].set_yticks([])
        panels[2].set(title="patient requests that were served, ms")
        panels[2].invert_yaxis()
        panels[2].legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=2)
        figure.savefig(path, dpi=100)


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    """One with a limit, by version 2 where it hands memory down, else by version 1."""
    root = Path("/sys/fs/cgroup")
    controllers = root / "cgroup.subtree_control"
    is_second = controllers.exists() and "memory" in controllers.read_text("utf-8").split()
    group = (root if is_second else root / "memory") / f"ctxalloc-overload-{os.getpid()}"
    group.mkdir()
    try:
        limit = group / ("memory.max" if is_second else "memory.limit_in_bytes")
        limit.write_text(str(CAPACITY + BESIDE), "utf-8")
        yield group
    finally:
        for _ in range(100):  # the last process may still be about to leave it
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def in_groups(seconds: float) -> int:
    """Which ways are killed."""
    print(f"{machine()}; {seconds:g} s of load each, a control group of {(CAPACITY + BESIDE) // MiB} MiB\n")
    for way, text in WAYS.items():
        with control_group() as group:
            enter = f'echo $$ > "{group}/cgroup.procs"; exec "$@"'
            command = ["sh", "-c", enter, "sh", sys.executable, __file__, "--way", way, "--seconds", str(seconds)]
            environment = os.environ | {"EACH_PAGE": "yes"}
            begun = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=seconds + 60, env=environment)
            if done.returncode < 0:
                print(
                    f"{text:34} killed by signal {-done.returncode} after {time.perf_counter() - begun:.1f} s",
                    flush=True,
                )
                continue
            row = json.loads(done.stdout)["row"]
            print(
                f"{text:34} survived; patient {row['patient_served']:.0%}, flood {row['flood_served']:.0%}", flush=True
            )
    return 0


def main() -> int:
    """Measures each way in a process of its own, prints, keeps and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12, help="of load for each way (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two seconds: does it run?")
    parser.add_argument("--picture", type=Path, help="where the picture goes besides target/bench")
    parser.add_argument("--group", action="store_true", help="which ways are killed in a control group?")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = 2.0 if options.quick else options.seconds
    if options.way:
        answers, peak_bytes, held = asyncio.run(send_all(options.way, seconds))
        json.dump({"row": row_of(answers, peak_bytes, seconds), "held": held}, sys.stdout)
        return 0
    if options.group:
        return in_groups(seconds)
    print(f"{machine()}; {seconds:g} s of load each, {CAPACITY // MiB} MiB of capacity\n")
    print(f"{'':34}{'goodput':>10}{'of cap.':>9}{'patient':>9}{'p50 ms':>8}{'p99 ms':>8}{'flood':>7}", end="")
    print(f"{'refused':>9}{'gave up':>9}{'peak MiB':>10}")
    rows: dict[str, dict[str, float]] = {}
    held_by: dict[str, list[tuple[float, float]]] = {}
    for way, text in WAYS.items():
        command = [sys.executable, __file__, "--way", way, "--seconds", str(seconds)]
        told = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=seconds + 60).stdout
        found = json.loads(told)
        rows[way] = row = found["row"]
        held_by[way] = found["held"]
        print(
            f"{text:34}{row['goodput_per_second']:8.1f}/s{row['goodput_of_capacity']:9.0%}{row['patient_served']:9.0%}"
            f"{row['patient_p50_ms']:8.0f}{row['patient_p99_ms']:8.0f}{row['flood_served']:7.0%}{row['refused']:9.0%}"
            f"{row['gave_up']:9.0%}{row['peak_mib']:10.0f}",
            flush=True,
        )
    place = keep("overload", {"seconds": seconds, "capacity_bytes": CAPACITY, "overload": rows})
    for path in [place.with_suffix(".png"), *filter(None, [options.picture])]:
        draw(path, rows, held_by)
    return 0


if __name__ == "__main__":
    sys.exit(main())
