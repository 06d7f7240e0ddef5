"""What `request(whole=True)` costs: with the library before malloc and nothing current, and in such a request.

Two processes of the same program differ by some hundredths, since what they import first decides where all else lies.
And a process gets faster or slower as it goes. So each turn starts two: one has no library and measures each loop
(`bare`), and then as often as the other once more (`again`); the other has it, and measures each loop before anything
is counted (`loaded`), then, while a first request has a block alive (`none`: nothing current), and in requests
(`current`), these two in turn. Loops take CPU time, the lower quarter of small groups. What is compared are medians of
the turns: `loaded` to `bare` between the processes; `none` and `current` to `loaded` within one, less what `again` is
to `bare` in the other; the aims are for the product.
Aims: nothing current at most 1.02, in a request at most 1.05 of the bare one on json, pandas, sqlite, lxml and scikit-
learn (those that are installed: target/bench/whole.json says which), and 1 / 0.97 on a service behind the middleware
that parses JSON, decodes a picture and reads rows, as `make demo-whole` has it, called without a server. Then blocks
of 64 bytes and of 64 KiB, made and freed in C by one, two and four threads. Options: --rounds N, --quick.
"""

import asyncio
import ctypes
import importlib.util
import io
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from harness import Row, keep, machine, rounds_asked, row_of, table

import ctxalloc

KINDS: Final = ("bare", "loaded", "none", "current")
TITLES: Final = {
    "bare": "without the library",
    "loaded": "with it, nothing counted yet",
    "none": "with it, nothing current",
    "current": "in a whole request",
}
Found = dict[str, dict[str, float]]
"""Nanoseconds of each loop by kind."""
ROWS: Final = 2000
"""With 3000, some processes map and unmap one of pymalloc's arenas (1 MiB) in each turn of `json`: 250 page faults."""
THREADS: Final = (1, 2, 4)

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


def cpu_ns(work: Callable[[], object], seconds: float) -> float:
    """The processor's nanoseconds for one: a quarter of the groups took less."""
    work()
    found: list[float] = []
    group, end = 1, time.process_time() + seconds
    while (begun := time.process_time()) < end or len(found) < 4:
        for _ in range(group):
            work()
        took = time.process_time() - begun
        found.append(took / group * 1e9)
        group = max(1, group // 2 if took > seconds / 20 else group * 2 if took < seconds / 80 else group)
    return statistics.quantiles(found, n=4)[0]


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


def works() -> dict[str, Callable[[str], Callable[[], object]]]:
    """Those whose libraries are installed: what each does, for a kind."""
    made: dict[str, Callable[[str], Callable[[], object]]] = {}
    for name, make in LOOPS.items():
        if importlib.util.find_spec(name) is not None:
            made[name] = partial(lambda work, _kind: work, make())
    if all(importlib.util.find_spec(name) for name in (SERVICE, "PIL", "sqlite3")):
        made["service"] = of_service
    return made


def around(kind: str) -> Any:
    """What each measurement is in."""
    return ctxalloc.request(whole=True) if kind == "current" else nullcontext()


def measure_here(process: str, library: Path, seconds: float) -> Found:
    """One turn, in this process."""
    found: dict[str, dict[str, list[float]]] = {}
    loops = works()

    def measure(kind: str) -> None:
        for name, make in loops.items():
            work = make(kind)
            for _ in range(3):
                work()  # what is imported and made once is nobody's
            with nullcontext() if name == "service" else around(kind):  # a service's requests are its middleware's
                found.setdefault(name, {}).setdefault(kind, []).append(cpu_ns(work, seconds))
        with around(kind):
            for size in (64, 65536):
                for threads in THREADS:
                    took = min(churned(library, size, threads, kind) for _ in range(3))
                    found.setdefault(f"{size} B, {threads} threads", {}).setdefault(kind, []).append(took)

    for _ in range(3):
        measure(process)
    neighbours: list[bytearray] = []
    if process == "loaded":
        with ctxalloc.request(whole=True):
            neighbours.append(bytearray(1 << 20))  # as in a busy service: another request has blocks, and each is asked
    for _ in range(3):
        for kind in ("none", "current") if process == "loaded" else ("again", "again"):
            measure(kind)
    return {name: {kind: statistics.median(values) for kind, values in kinds.items()} for name, kinds in found.items()}


def built(folder: str) -> Path:
    """The C library."""
    source, library = Path(folder, "churn.c"), Path(folder, "churn.so")
    source.write_text(SOURCE, encoding="utf-8")
    command = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*command, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def environment(preload: str | None) -> dict[str, str]:
    """Of a process with this library, or none, before malloc."""
    variables = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "CTXALLOC_WHOLE")}
    return {**variables, "LD_PRELOAD": preload} if preload else variables


def ratios_of(turns: list[Found], name: str) -> dict[str, float]:
    """To the bare process: `loaded` by medians, the others by how they change within a process, as `again` does not."""

    def median(kind: str) -> float:
        return statistics.median(turn[name][kind] for turn in turns)

    def changes(kind: str) -> float:
        ours = (turn[name] for turn in turns)
        return statistics.median(one[kind] / one["loaded"] / (one["again"] / one["bare"]) for one in ours)

    loaded = median("loaded") / median("bare")
    return {"loaded": loaded, **{kind: loaded * changes(kind) for kind in ("none", "current")}}


def main() -> None:
    """Measures, prints and keeps."""
    if len(sys.argv) > 1 and sys.argv[1] in ("bare", "loaded"):
        print(json.dumps(measure_here(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
        return
    count = max(3, rounds_asked(__doc__) // 4)
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=False)
    if made.returncode:
        print(f"not measured: {made.stderr.strip()}")
        return
    turns: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        library = built(folder)
        for turn in range(count):
            found: Found = {}
            for kind in ("bare", "loaded") if turn % 2 else ("loaded", "bare"):
                command = [sys.executable, __file__, kind, str(library), "0.05" if count == 3 else "0.2"]
                variables = environment(made.stdout.strip() if kind == "loaded" else None)
                ended = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
                for name, kinds in json.loads(ended.stdout).items():
                    found.setdefault(name, {}).update(kinds)
            turns.append(found)
    print(f"{machine()}; {count} turns, medians")
    rows: dict[str, dict[str, Row]] = {}
    for name in turns[0]:
        rows[name] = {TITLES[kind]: row_of([turn[name][kind] for turn in turns]) for kind in KINDS}
        table(name, rows[name], TITLES["bare"])
    ratios = {name: ratios_of(turns, name) for name in rows}
    print("\nto the process without the library; the last two by how they change within a process")
    for name, found_ratios in ratios.items():
        print(f"{name:24}" + "  ".join(f"{TITLES[kind]} {ratio:.3f}" for kind, ratio in found_ratios.items()))
    keep("whole", {"turns": count, "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
