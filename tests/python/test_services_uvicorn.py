"""The middleware behind uvicorn: connections that are used again, pipelines, uploads, clients that go away."""

import asyncio
from typing import Any

import pytest
from servers import connected, counts_when, served

pytestmark = pytest.mark.any_numpy

pytest.importorskip("uvicorn")

HTTP = ["h11", "httptools"]
LOOPS = ["asyncio", "uvloop"]


@pytest.mark.parametrize("http", HTTP)
@pytest.mark.parametrize("loop", LOOPS)
def test_on_one_connection_every_array_is_in_its_own_request(loop: str, http: str) -> None:
    for library in {loop, http} - {"asyncio"}:
        pytest.importorskip(library)

    async def scenario(port: int) -> None:
        upload = bytes(range(256)) * 2000
        async with connected(port) as connection:
            for path, body in [("/echo", upload), ("/health", b""), ("/work", b"abc"), ("/health", upload)] * 3:
                answer = await connection.ask(path, body)
                assert answer.json["ok"], (path, answer)
            asked = [("/work", b"a"), ("/health", b""), ("/work", upload), ("/health", b""), ("/stream", b"b")]
            for (path, _), answer in zip(asked, await connection.pipeline(asked), strict=True):
                assert answer.json["ok"], (path, answer)
            refused = await connection.ask("/big")
            assert (refused.status, refused.headers["content-type"]) == (413, "application/problem+json")
            assert (await connection.ask("/work", b"after")).json["ok"]
            assert (await connection.ask("/keep", b"k")).json["ok"]
        async with connected(port) as gone:
            gone.write("/work", upload, cut=100_000)
            await gone.writer.drain()
        async with connected(port) as gone:
            gone.write("/hang")
            await gone.writer.drain()
        counted = await counts_when(port, lambda counts: counts["ended"] == counts["begun"] == 14)
        assert counted.get("wrong", 0) == 0
        assert counted["refused"] == 1
        assert counted["completed"] == 11
        assert counted["escaped"] == 1, "of /keep; what threads and tasks computed was let go of"
        assert counted["disconnected"] == 2

    with served(uvicorn(loop, http)) as port:
        asyncio.run(scenario(port))


def uvicorn(loop: str, http: str, *more: str) -> list[Any]:
    options = ["--port", "{port}", "--loop", loop, "--http", http, "--log-level", "warning", *more]
    return ["-m", "uvicorn", "served_app:service", *options]
