"""What seeing costs: a request that is counted under a name, a profile, a snapshot, a scrape; `ctxalloc run`, the page.

Every variant runs in turn, round after round; medians are compared. What `ctxalloc run` adds is measured in processes
of their own, which run the same loop by `python` and by `ctxalloc run`, in turn (aim: nothing, within the noise). So is
what the live page adds to a request of the middleware, mounted and asked by nobody; not mounted, it is not imported.
So is what `import ctxalloc` costs beside NumPy's import.
Counting itself is in Rust's bench: the rows of benches/requests.rs with a name and without. Numbers go to
target/bench/observe.json. Options: --rounds N, --quick.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, keep, loop, medians, rounds_asked, row_of, table

import ctxalloc
from ctxalloc import _profile, metrics
from ctxalloc._page import numbers

SCRIPT = """\
import time
import numpy as np
def run(n):
    empty = np.empty
    begun = time.perf_counter()
    for _ in range(n):
        empty(1000)
    return (time.perf_counter() - begun) / n * 1e9
run(1000)
print(min(run(100_000) for _ in range(5)))
"""


PAGE = """\
import asyncio, sys, time
import ctxalloc
from ctxalloc.asgi import AllocatorMiddleware
async def empty(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
app, mounted = empty, None
if sys.argv[1] == "mounted":
    from ctxalloc.asgi import debug_app
    page = debug_app()
    async def app(scope, receive, send):
        await (page if scope["path"].startswith("/debug/memory/") else empty)(scope, receive, send)
else:
    async def app(scope, receive, send):
        await (empty if scope["path"].startswith("/debug/memory/") else empty)(scope, receive, send)
    assert "ctxalloc._page" not in sys.modules
service = AllocatorMiddleware(app)
scope = {"type": "http", "method": "GET", "path": "/work", "headers": [], "client": ("127.0.0.1", 1)}
async def receive(): ...
async def send(message): ...
async def run(n):
    begun = time.process_time()
    for _ in range(n):
        await service(scope, receive, send)
    return (time.process_time() - begun) / n * 1e9
asyncio.run(run(1000))
print(min(asyncio.run(run(10_000)) for _ in range(5)))
"""


IMPORT = """\
import sys, time
begun = time.perf_counter()
import numpy
if sys.argv[1] == "both":
    import ctxalloc
print((time.perf_counter() - begun) * 1e9)
"""


def requests(rounds: int) -> dict[str, Row]:
    """A request in Python, by its name."""
    names: dict[str, Any] = {"request": ctxalloc.request}
    variants = {
        "request()": loop("with request():\n    pass", **names),
        "request(name=...)": loop("with request(name='/route/{id}'):\n    pass", **names),
    }
    rows = medians(variants, rounds, 2000)
    table("a request with nothing in it", rows, "request()")
    return rows


def profile(rounds: int) -> dict[str, Row]:
    """An array, with a profile and without."""
    plain = loop("empty(1000)", empty=np.empty)

    def profiled(count: int) -> float:
        with _profile.profiled():
            return plain(count)

    rows = medians({"numpy.empty(1000)": plain, "the same, in a profile (--report)": profiled}, rounds, 2000)
    table("an array of 8 kB", rows, "numpy.empty(1000)")
    return rows


def reading(rounds: int) -> dict[str, Row]:
    """Who reads: with 128 names."""
    for number in range(128):
        with ctxalloc.request(name=f"route {number}"):
            np.empty(100)
    variants = {
        "metrics.snapshot(), 128 names": loop("snapshot()", snapshot=metrics.snapshot),
        "coverage()": loop("coverage()", coverage=ctxalloc.coverage),
        "the page's numbers": loop("numbers()", numbers=numbers),
    }
    rows = medians(variants, max(3, rounds // 4), 10)
    table("reading", rows, "metrics.snapshot(), 128 names")
    return rows


def processes(script: str, commands: dict[str, list[str]], rounds: int, title: str) -> dict[str, Row]:
    """What a script prints, run in each way in turn, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script, encoding="utf-8")
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, words in commands.items():
                command = [sys.executable, *(word.format(script=path) for word in words)]
                times[name].append(float(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
    rows = {name: row_of(all_times) for name, all_times in times.items()}
    table(title, rows, next(iter(rows)))
    return rows


def run_alone(rounds: int) -> dict[str, Row]:
    """The same loop by ``python`` and by ``ctxalloc run``."""
    commands = {"python": ["{script}"], "ctxalloc run": ["-m", "ctxalloc", "run", "{script}"]}
    return processes(SCRIPT, commands, rounds, "an array of 8 kB, in processes of their own")


def page(rounds: int) -> dict[str, Row]:
    """A request of the middleware, with the page mounted beside the application, and without."""
    commands = {"not mounted": ["{script}", "not"], "mounted, and asked by nobody": ["{script}", "mounted"]}
    return processes(PAGE, commands, rounds, "a request of AllocatorMiddleware and the live page")


def imports(rounds: int) -> dict[str, Row]:
    """The import of NumPy, and of both."""
    commands = {"import numpy": ["{script}", "numpy"], "import numpy, ctxalloc": ["{script}", "both"]}
    return processes(IMPORT, commands, rounds, "an import, in processes of their own")


def main() -> None:
    """Measures, prints and keeps."""
    rounds = rounds_asked(__doc__)
    found = {"requests": requests(rounds), "profile": profile(rounds), "reading": reading(rounds)}
    few = max(5, rounds // 4)
    keep("observe", {"rounds": rounds, **found, "run": run_alone(few), "page": page(few), "imports": imports(rounds)})


if __name__ == "__main__":
    main()
