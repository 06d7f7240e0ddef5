"""What `request(whole=True)` costs: with the library before malloc and nothing current, and in such a request.

Each turn starts two processes of the same program, one without the library (`bare`), and lets them measure by turns on
one processor, a fiftieth of a second each: what the machine does meanwhile meets both. The other one has the library:
first before anything is counted (`loaded`), then, while an ended request has a block alive, with nothing current
(`none`) and in a request (`current`). A turn's figure is what a quarter of its CPU times are below, since a shared
machine is slower by half at times.
Two processes differ by some hundredths, since what they import first decides where all else lies. So what is compared
are medians of the turns: `loaded` to `bare` between the processes; `none` and `current` to `loaded` within one, less
what `bare` changed to meanwhile in the other (`again`, by work that is made anew as theirs is); the aims are for the
product. The quarters are those of the turns. A third process has a library before malloc that only passes each call on
(`passed`): what any such library costs.
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

KINDS: Final = ("bare", "passed", "loaded", "none", "current")
TITLES: Final = {
    "bare": "without the library",
    "passed": "with one that only passes on",
    "loaded": "with it, nothing counted yet",
    "none": "with it, nothing current",
    "current": "in a whole request",
}
Found = dict[str, dict[str, float]]
"""Nanoseconds of each kind, before anything is counted and after it."""
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


PASSING: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);
/* By pointers, as for any allocator that may stand behind it. */
static struct {
    void *(*malloc)(size_t), *(*calloc)(size_t, size_t), *(*realloc)(void *, size_t);
    void (*free)(void *);
} next = {__libc_malloc, __libc_calloc, __libc_realloc, __libc_free};
__attribute__((constructor)) static void find(void) {
    *(void **)&next.malloc = dlsym(RTLD_NEXT, "malloc");
    *(void **)&next.calloc = dlsym(RTLD_NEXT, "calloc");
    *(void **)&next.realloc = dlsym(RTLD_NEXT, "realloc");
    *(void **)&next.free = dlsym(RTLD_NEXT, "free");
}
void *malloc(size_t size) { return next.malloc(size); }
void *calloc(size_t count, size_t each) { return next.calloc(count, each); }
void *realloc(void *old, size_t size) { return next.realloc(old, size); }
void free(void *block) { next.free(block); }
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
    """The processor's nanoseconds for one."""
    work()
    count, end, begun = 0, time.process_time() + seconds, time.process_time()
    while (now := time.process_time()) < end or not count:
        work()
        count += 1
    return (now - begun) / count * 1e9


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


def answer(library: Path) -> None:
    """Measures, in this process, what each line of standard input asks for: [name, kind, seconds]."""
    made, loops, neighbours = dict[tuple[str, str], Callable[[], object]](), works(), list[bytearray]()
    processors = os.sched_getaffinity(0)
    print(json.dumps(list(loops)), flush=True)
    for line in sys.stdin:
        name, kind, seconds = json.loads(line)
        if kind in ("none", "current") and not neighbours:
            with ctxalloc.request(whole=True):
                neighbours.append(bytearray(1 << 20))  # as in a busy service: another request has blocks, each is asked
        os.sched_setaffinity(0, {min(processors)} if name in loops else processors)
        if name in loops:
            if (name, kind) not in made:
                made[name, kind] = loops[name](kind)
                for _ in range(3):
                    made[name, kind]()  # what is imported and made once is nobody's
            with nullcontext() if name == "service" else around(kind):  # a service's requests are its middleware's
                took = cpu_ns(made[name, kind], seconds)
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

    def ask(self, name: str, kind: str, seconds: float) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, kind, seconds]) + "\n")
        self.process.stdin.flush()
        return float(self.read())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def turn(library: Path, preload: str, groups: int, seconds: float, *, blocks: bool) -> dict[str, Found]:
    """The CPU times of three processes, by loop: those before anything is counted, and those after it."""
    bare, loaded = Asked(library, None), Asked(library, preload)
    passed = Asked(library, str(library.with_name("passing.so")))
    of_kind = {"bare": bare, "again": bare, "passed": passed}
    found: dict[str, Found] = {}
    names = [f"{size} B, {threads} threads" for size in (64, 65536) for threads in THREADS] if blocks else []
    for phase, kinds in (("before", ("bare", "passed", "loaded")), ("after", ("again", "none", "current"))):
        for name in loaded.loops + names:
            took: dict[str, list[float]] = {kind: [] for kind in kinds}
            for group in range(groups if name in loaded.loops else 3):
                for kind in kinds if group % 2 else reversed(kinds):
                    took[kind].append(of_kind.get(kind, loaded).ask(name, kind, seconds))
            found.setdefault(name, {})[phase] = {kind: statistics.quantiles(of, n=4)[0] for kind, of in took.items()}
    for process in (bare, passed, loaded):
        process.end()
    return found


def built(folder: str) -> Path:
    """The C library that makes blocks; beside it is the one that passes on."""
    command = shlex.split(os.environ.get("CC", "cc"))
    for name, text in (("churn", SOURCE), ("passing", PASSING)):
        source = Path(folder, f"{name}.c")
        source.write_text(text, encoding="utf-8")
        library = source.with_suffix(".so")
        subprocess.run([*command, "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", library, source], check=True)
    return Path(folder, "churn.so")


def environment(preload: str | None) -> dict[str, str]:
    """Of a process with this library, or none, before malloc."""
    variables = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "CTXALLOC_WHOLE")}
    return {**variables, "LD_PRELOAD": preload} if preload else variables


def ratios_of(turns: list[Found], kind: str) -> list[float]:
    """To the bare process, one for each turn: see above."""
    if kind in ("passed", "loaded"):
        return [one["before"][kind] / one["before"]["bare"] for one in turns]
    loaded = statistics.median(ratios_of(turns, "loaded"))
    before = (one["before"]["loaded"] / one["before"]["bare"] for one in turns)
    after = (one["after"][kind] / one["after"]["again"] for one in turns)
    return [loaded * late / early for early, late in zip(before, after, strict=True)]


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
        library, preload = built(folder), made.stdout.strip()
        turns = [turn(library, preload, 9, 0.02, blocks=number % 4 == 0 or count == 3) for number in range(count)]
    print(f"{machine()}; {count} turns, medians")
    rows: dict[str, dict[str, Row]] = {}
    ratios: dict[str, dict[str, float]] = {}
    told = ["\nto the process without the library; the last two by how they change within a process (quarters)"]
    for name in turns[0]:
        found = [one[name] for one in turns if name in one]
        of_kind = {kind: [{**one["before"], **one["after"]}[kind] for one in found] for kind in KINDS}
        rows[name] = {TITLES[kind]: row_of(times) for kind, times in of_kind.items()}
        table(name, rows[name], TITLES["bare"])
        quarters = {kind: statistics.quantiles(ratios_of(found, kind), n=4) for kind in KINDS[1:]}
        ratios[name] = {kind: median for kind, (_, median, _) in quarters.items()}
        parts = (f"{TITLES[kind]} {one:.3f} ({low:.3f} .. {high:.3f})" for kind, (low, one, high) in quarters.items())
        told.append(f"{name:24}{'  '.join(parts)}")
    print("\n".join(told))
    keep("whole", {"turns": count, "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
