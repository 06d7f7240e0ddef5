"""The service: Starlette, and routes that parse JSON, decode pictures and read rows of SQLite. It makes no array.

Each request has its tenant's budget (``serving``). ``arrays`` has requests count what ctxalloc counts by itself,
``whole`` everything. Run by ``whole``.
"""

import io
import json
import random
import sqlite3
import sys
from collections.abc import Callable
from typing import Any, Final

from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

import ctxalloc
from ctxalloc import MiB
from ctxalloc.asgi import AllocatorMiddleware, Report, Scope

from .serving import run, tenant_of

ROWS: Final = {"small": 5_000, "large": 60_000}
SIDES: Final = {"small": 500, "large": 3_000}

peaks: dict[str, list[tuple[int, int, int]]] = {}


def made(sizes: dict[str, int], make: Callable[[int], bytes]) -> dict[str, bytes]:
    """What a client would send, of each size."""
    return {name: make(size) for name, size in sizes.items()}


def document(rows: int) -> bytes:
    """Some JSON."""
    return json.dumps(
        [{"number": row, "words": [f"word {row + at}" for at in range(4)]} for row in range(rows)]
    ).encode()


def picture(side: int) -> bytes:
    """A PNG."""
    tile = Image.frombytes("RGB", (50, 50), random.Random(1).randbytes(7500))
    whole, out = Image.new("RGB", (side, side)), io.BytesIO()
    for at in range(0, side, 50):
        whole.paste(tile, (at, at))
    whole.save(out, "PNG", compress_level=1)
    return out.getvalue()


DOCUMENTS: Final = made(ROWS, document)
PICTURES: Final = made(SIDES, picture)


def parse(request: Request) -> PlainTextResponse:
    """Parses a document, and writes a part of it again."""
    found = json.loads(DOCUMENTS[request.path_params["size"]])
    return PlainTextResponse(f"{sum(len(json.dumps(row)) for row in found)}")


def decode(request: Request) -> PlainTextResponse:
    """Decodes a picture, and makes it smaller."""
    with Image.open(io.BytesIO(PICTURES[request.path_params["size"]])) as opened:
        image = opened.convert("RGB")
    return PlainTextResponse(str(image.resize((64, 64)).getpixel((1, 1))))


def read(request: Request) -> PlainTextResponse:
    """Reads all rows of a table at once."""
    with sqlite3.connect(":memory:") as base:
        base.execute("create table words(number integer, word text)")
        rows = ((row, f"a word of some length, {row}" * 4) for row in range(ROWS[request.path_params["size"]]))
        base.executemany("insert into words values (?, ?)", rows)
        found = base.execute("select * from words").fetchall()
    base.close()
    return PlainTextResponse(f"{len(found)}")


async def show_peaks(_: Request) -> JSONResponse:
    """What ``on_end`` was told: of each request the parts of its peak."""
    return JSONResponse(peaks)


def on_end(_scope: Scope, report: Report) -> None:
    """Keeps the parts of the peak of each request that was served, by its route."""
    if report.route and report.outcome == "completed":
        parts = report.stats.whole
        found = (
            (report.stats.peak_bytes, 0, 0)
            if parts is None
            else (parts.array_at_peak_bytes, parts.native_at_peak_bytes, parts.object_at_peak_bytes)
        )
        peaks.setdefault(report.route, []).append(found)


def build(*, is_whole: bool) -> Any:
    """The application, each request of which has its tenant's budget, for everything or for arrays."""
    work = {"/parse/{size}": parse, "/decode/{size}": decode, "/read/{size}": read}
    app = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in work.items()),
            Route("/peaks", show_peaks),
        ]
    )
    routes: dict[str, Any] = {path: ctxalloc.request(limit_bytes=256 * MiB, whole=is_whole) for path in work}
    return AllocatorMiddleware(app, routes={**routes, "/peaks": None}, tenant=tenant_of, on_end=on_end)


def main() -> None:
    """``python -m examples.tenants.whole_app whole`` or ``arrays``."""
    run(build(is_whole=sys.argv[1] == "whole"))


if __name__ == "__main__":
    main()
