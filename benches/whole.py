"""What `request(whole=True)` costs: with the library before malloc and nothing current, and in such a request.

All is compared within one process, by turns: two processes differ by some hundredths, since what they import first
decides where all else lies, and other users of a machine slow it by half for some milliseconds. Two switches of
`switch.c`, which is compiled with the library's own source, make that possible. Before anything is counted, every
library's calls of malloc are led around it (`bare`), or to it (`off`). Later, while an ended request has a block alive,
as in a busy service, it counts nothing (`off`), has nothing current (`none`) or is in a request (`current`). The loops
run one at a time, each between its neighbours, forwards and then backwards; a process's figure is the median of such
rounds. The figures are the medians of the processes, with where the median is by their order (95 %); the aims are for
the product of `off` to `bare` and of the others to `off`.

Aims: nothing current at most 1.02, in a request at most 1.05 of the bare one on json, pandas, sqlite, lxml and scikit-
learn (those that are installed: target/bench/whole.json says which), and 1 / 0.97 on a service behind the middleware
that parses JSON, decodes a picture and reads rows, as `make demo-whole` has it, called without a server. Then blocks
of 64 bytes and of 64 KiB, made and freed in C by one, two and four threads. `make bench-whole` has all of the
libraries. Options: --rounds N, --quick.
"""

import asyncio
import ctypes
import importlib.util
import io
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from harness import Row, keep, machine, rounds_asked, row_of, table

import ctxalloc

BEFORE: Final = ("bare", "off")
AFTER: Final = ("off", "none", "current")
TITLES: Final = {
    "bare": "without the library",
    "off": "with it, nothing counted",
    "none": "with it, nothing current",
    "current": "in a whole request",
}
Times = dict[str, list[float]]
"""Nanoseconds, of each kind."""
ROWS: Final = 2000
"""With 3000, some processes map and unmap one of pymalloc's arenas (1 MiB) in each turn of `json`: 250 page faults."""
THREADS: Final = (1, 2, 4)
SWITCH: Final = Path(__file__).with_name("switch.c")
PRELOAD: Final = Path(__file__).parents[1] / "src" / "whole"

SOURCE: Final = """
#include <stdlib.h>
void churn(size_t size, size_t count) {
    void *volatile blocks[16] = {0};
    for (size_t n = 0; n < count; n++) {
        free(blocks[n % 16]);
        blocks[n % 16] = malloc(size);
        *(volatile char *)blocks[n % 16] = 1;
    }
    for (int n = 0; n < 16; n++) free(blocks[n]);
}
"""


def of_json() -> Callable[[], object]:
    """Parses a document and writes it."""
    text = json.dumps([{"number": n, "words": ["a", "few", str(n)]} for n in range(ROWS)])
    return lambda: json.dumps(json.loads(text))


def of_sqlite() -> Callable[[], object]:
    """Fills a table and reads it."""
    import sqlite3  # noqa: PLC0415 - if it is installed

    def work() -> None:
        base = sqlite3.connect(":memory:")
        base.execute("create table t(a integer, b text)")
        base.executemany("insert into t values (?, ?)", [(n, f"text {n}") for n in range(ROWS)])
        base.execute("select * from t").fetchall()
        base.close()

    return work


def of_pandas() -> Callable[[], object]:
    """Groups a frame with words."""
    import pandas as pd  # noqa: PLC0415 - if it is installed

    frame = pd.DataFrame({"word": [f"w{n % 50}" for n in range(ROWS)], "number": range(ROWS)})
    return lambda: frame.assign(twice=frame.number * 2).groupby("word").agg(["sum", "mean"])


def of_lxml() -> Callable[[], object]:
    """Parses a tree and writes it."""
    from lxml import etree  # noqa: PLC0415 - if it is installed

    text = b"<a>" + b"<b c='1'>text</b>" * ROWS + b"</a>"
    return lambda: etree.tostring(etree.fromstring(text))


def of_sklearn() -> Callable[[], object]:
    """Fits a small forest."""
    import numpy as np  # noqa: PLC0415 - if it is installed
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 - if it is installed

    random = np.random.default_rng(1)
    points, classes = random.random((500, 8)), random.integers(0, 2, 500)
    return lambda: RandomForestClassifier(5, random_state=1).fit(points, classes).predict(points)


LOOPS: Final[dict[str, Callable[[], Callable[[], object]]]] = {
    "json": of_json,
    "sqlite3": of_sqlite,
    "pandas": of_pandas,
    "lxml": of_lxml,
    "sklearn": of_sklearn,
}


SERVICE: Final = "starlette"


def of_service(kind: str) -> Callable[[], object]:
    """Each route once. The terms are whole in `current`; in the others they count arrays."""
    import sqlite3  # noqa: PLC0415 - if it is installed

    from PIL import Image  # noqa: PLC0415 - if it is installed
    from starlette.applications import Starlette  # noqa: PLC0415 - if it is installed
    from starlette.requests import Request  # noqa: PLC0415 - if it is installed
    from starlette.responses import JSONResponse  # noqa: PLC0415 - if it is installed
    from starlette.routing import Route  # noqa: PLC0415 - if it is installed

    from ctxalloc.asgi import AllocatorMiddleware  # noqa: PLC0415 - if it is needed

    file, base = io.BytesIO(), sqlite3.connect(":memory:")
    Image.effect_noise((500, 500), 50).save(file, "JPEG")
    base.execute("create table t(a integer, b text)")
    base.executemany("insert into t values (?, ?)", [(n, f"text {n}") for n in range(ROWS)])

    async def parse(request: Request) -> JSONResponse:
        return JSONResponse(len(json.loads(await request.body())))

    async def decode(request: Request) -> JSONResponse:
        return JSONResponse(Image.open(io.BytesIO(await request.body())).convert("RGB").resize((100, 100)).size)

    async def read(_request: Request) -> JSONResponse:
        return JSONResponse(len(base.execute("select * from t").fetchall()))

    text = json.dumps([{"number": n, "words": ["a", "few", str(n)]} for n in range(ROWS)]).encode()
    bodies = {"/parse": text, "/decode": file.getvalue(), "/read": b""}
    routes = [Route(f"/{route.__name__}", route, methods=["POST"]) for route in (parse, decode, read)]
    service = AllocatorMiddleware(Starlette(routes=routes), default=ctxalloc.request(whole=kind == "current"))
    loop = asyncio.new_event_loop()

    async def ask() -> None:
        for path, body in bodies.items():
            scope = {
                "type": "http",
                "method": "POST",
                "path": path,
                "root_path": "",
                "query_string": b"",
                "headers": [],
            }

            async def receive(body: bytes = body) -> dict[str, Any]:
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message: dict[str, Any]) -> None:
                if message.get("status", 200) != 200:
                    raise RuntimeError(f"the bench's own route answered {message['status']}")

            await service(scope, receive, send)

    return lambda: loop.run_until_complete(ask())


Works = dict[str, Callable[[], object]]
"""What is done, of each kind."""


def cpu_ns(work: Callable[[], object], seconds: float) -> float:
    """The processor's nanoseconds for one."""
    work()
    count, end, begun = 0, time.thread_time() + seconds, time.thread_time()
    while (now := time.thread_time()) < end or not count:
        work()
        count += 1
    return (now - begun) / count * 1e9


def by_turns(works: Works, kinds: Sequence[str], seconds: float) -> Times:
    """What each kind takes in one round after the other, for so long."""
    found: Times = {kind: [] for kind in kinds}
    end = time.monotonic() + seconds
    while time.monotonic() < end or not found["off"]:
        order = random.sample(kinds, len(kinds))
        took = dict.fromkeys(kinds, 0.0)
        for kind in (*order, *reversed(order)):
            switch_to(kind, kinds)
            with around(kind) if works[kind] is works["off"] else nullcontext():  # a service's are its middleware's
                took[kind] += cpu_ns(works[kind], 0.002)
        switch_to(kinds[-1], kinds)
        for kind in kinds:
            found[kind].append(took[kind] / 2)
    return found


def switch_to(kind: str, kinds: Sequence[str]) -> None:
    """What this process's calls of malloc meet from now on (`switch.c`)."""
    library = ctypes.PyDLL(None)  # which is before all others
    if kinds is BEFORE:
        if not library.ctxalloc_bench_go_around(ctypes.c_bool(kind == "bare")):
            raise SystemExit("no library's calls of malloc were led around ours")
    else:
        library.ctxalloc_bench_switch(ctypes.c_bool(kind != "off"))


def churned(library: Path, size: int, threads: int, kind: str) -> float:
    """Nanoseconds for a block that is made and freed in C, as the clock says, with so many threads at it."""
    churn = ctypes.CDLL(str(library)).churn  # without the GIL
    churn.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    count, gate = 2_000_000 // (8 if size > 1024 else 1) // threads, threading.Barrier(threads + 1)

    def work() -> None:
        kept = [bytes(100) for _ in range(100)]  # the thread learns whose it is
        gate.wait()
        churn(size, count)
        gate.wait()
        del kept

    workers = [threading.Thread(target=ctxalloc.wrap(work) if kind == "current" else work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    begun = time.perf_counter()
    gate.wait()
    took = time.perf_counter() - begun
    for worker in workers:
        worker.join()
    return took / count / threads * 1e9


def works() -> dict[str, Callable[[Collection[str]], Works]]:
    """Those whose libraries are installed: what makes what each does, for so many kinds."""
    found: dict[str, Callable[[Collection[str]], Works]] = {}
    for name, make in LOOPS.items():
        if importlib.util.find_spec(name) is not None:
            found[name] = partial(lambda make, kinds: dict.fromkeys(kinds, make()), make)
    if all(importlib.util.find_spec(name) for name in (SERVICE, "PIL", "sqlite3")):
        found["service"] = lambda kinds: {kind: of_service(kind) for kind in kinds}
    return found


def around(kind: str) -> Any:
    """What each measurement is in."""
    return ctxalloc.request(whole=True) if kind == "current" else nullcontext()


def answer(library: Path) -> None:
    """Measures, in this process, what each line of standard input asks for: [name, kind, seconds].

    Of the kinds `before` and `after` are all of `BEFORE` and `AFTER`, by turns.
    """
    loops, neighbours = works(), list[bytearray]()
    processors = os.sched_getaffinity(0)
    print(json.dumps(list(loops)), flush=True)
    for line in sys.stdin:
        name, kind, seconds = json.loads(line)
        os.sched_setaffinity(0, {min(processors)} if name in loops else processors)
        if kind in ("none", "current", "after") and not neighbours:
            with ctxalloc.request(whole=True):
                neighbours.append(bytearray(1 << 20))  # as in a busy service: another request has blocks, each is asked
        if name in loops:
            kinds = BEFORE if kind == "before" else AFTER
            made = loops[name](kinds)
            for work in made.values():
                for _ in range(3):
                    work()  # what is imported and made once is nobody's
            print(json.dumps(by_turns(made, kinds, seconds)), flush=True)
        else:
            size, threads = (int(word) for word in name.split() if word.isdecimal())
            with around(kind):
                took = min(churned(library, size, threads, kind) for _ in range(3))
            print(took, flush=True)


class Asked:
    """A process that measures."""

    def __init__(self, library: Path, preload: str | None) -> None:
        command = [sys.executable, __file__, "answer", str(library)]
        self.process = subprocess.Popen(
            command, env=environment(preload), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.loops: list[str] = json.loads(self.read())

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process that measures ended with {self.process.wait()}")
        return line

    def ask(self, name: str, kind: str, seconds: float) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, kind, seconds]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.read())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


Turn = dict[str, tuple[Times, Times]]
"""Of each loop: before anything was counted, and after that."""


def turn(library: Path, seconds: float, *, blocks: bool) -> Turn:
    """The CPU times in a new process, by loop. `blocks`: of the blocks in C, too, beside one without the library."""
    ours, found = Asked(library, str(library.with_name("switched.so"))), Turn()
    before = {name: ours.ask(name, "before", seconds) for name in ours.loops}
    for name, times in before.items():
        found[name] = times, ours.ask(name, "after", seconds)
    if blocks:
        bare = Asked(library, None)
        asked = {"bare": bare, "none": ours, "current": ours}
        for name in (f"{size} B, {threads} threads" for size in (64, 65536) for threads in THREADS):
            found[name] = {kind: [of.ask(name, kind, 0) for _ in range(3)] for kind, of in asked.items()}, {}
        bare.end()
    ours.end()
    return found


def built(folder: str) -> Path:
    """The C library that makes blocks; beside it is ours, with its switches."""
    command = [*shlex.split(os.environ.get("CC", "cc")), "-std=gnu11", "-O2", "-shared", "-fPIC"]
    source, churn = Path(folder, "churn.c"), Path(folder, "churn.so")
    source.write_text(SOURCE, encoding="utf-8")
    subprocess.run([*command, "-fno-builtin", "-o", churn, source], check=True)
    sources = [SWITCH, PRELOAD / "first.c", PRELOAD / "arrow.c"]  # and as build.rs compiles them
    ours = Path(folder, "switched.so")
    subprocess.run([*command, "-fvisibility=hidden", f"-I{PRELOAD}", "-o", ours, *sources, "-ldl"], check=True)
    return churn


def environment(preload: str | None) -> dict[str, str]:
    """Of a process with this library, or none, before malloc."""
    variables = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "CTXALLOC_WHOLE")}
    return {**variables, "LD_PRELOAD": preload} if preload else variables


def paired(times: Times, kind: str, base: str) -> float:
    """The median of the ratios of what was measured side by side."""
    return statistics.median(one / other for one, other in zip(times[kind], times[base], strict=True))


def placed(ratios: list[float]) -> tuple[float, float, float]:
    """Their median, and between which of them it is, with 95 %: by the order of so many draws."""
    count, ordered = len(ratios), sorted(ratios)
    first = max(0, int(count / 2 - 0.98 * math.sqrt(count)))
    return statistics.median(ordered), ordered[first], ordered[-1 - first]


def main() -> None:
    """Measures, prints and keeps."""
    if sys.argv[1:2] == ["answer"]:
        answer(Path(sys.argv[2]))
        return
    count = max(3, rounds_asked(__doc__) // 2)
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=False)
    if made.returncode:
        print(f"not measured: {made.stderr.strip()}")
        return
    with tempfile.TemporaryDirectory() as folder:
        library = built(folder)
        turns = [turn(library, 0.5 if count == 3 else 3, blocks=at % 4 == 0 or count == 3) for at in range(count)]
    print(f"{machine()}; {count} turns, medians")
    rows: dict[str, dict[str, Row]] = {}
    ratios: dict[str, dict[str, float]] = {}
    told = ["\nnothing counted to without the library, the others to nothing counted (blocks in C: to without); (95 %)"]
    for name in turns[0]:
        found = [one[name] for one in turns if name in one]
        times: Times = {}
        parts: dict[str, tuple[float, float, float]] = {}
        ratios[name], loaded = {}, 1.0
        for phase in ([one[at] for one in found if one[at]] for at in (0, 1)):  # blocks in C have the first only
            for kind in phase[0].keys() - times.keys() if phase else ():
                times[kind] = [statistics.median(one[kind]) for one in phase]
                if kind != "bare":
                    parts[kind] = placed([paired(one, kind, "bare" if "bare" in one else "off") for one in phase])
                    ratios[name][kind] = parts[kind][0] * loaded
            loaded = ratios[name].get("off", 1.0)
        rows[name] = {TITLES[kind]: row_of(times[kind]) for kind in TITLES if kind in times}
        table(name, rows[name], TITLES["bare"])
        texts = (
            f"{title} {parts[kind][0]:.4f} ({parts[kind][1]:.4f} to {parts[kind][2]:.4f})"
            for kind, title in TITLES.items()
            if kind in parts
        )
        told.append(f"{name:24}{'  '.join(texts)}")
    print("\n".join(told))
    keep("whole", {"turns": count, "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
