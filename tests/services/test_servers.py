"""The middlewares behind each server, under load: every array in its own request, one end for each, no growth.

`CTXALLOC_REQUESTS` is how many requests the long test sends to each server (5000 by default; 100,000 once in a while).
"""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import PATIENCE_S, Connection, connected, counts_when, served

REQUESTS = int(os.environ.get("CTXALLOC_REQUESTS", "5000"))
IDLE = 5000
UPLOAD = bytes(range(256)) * 1200

ASGI: dict[str, list[str]] = {
    **{
        f"uvicorn {loop} {http}": [
            *("-m", "uvicorn", "served_app:service", "--port", "{port}", "--loop", loop, "--http", http),
            *("--log-level", "warning"),
        ]
        for loop in ("asyncio", "uvloop")
        for http in ("h11", "httptools")
    },
    "uvicorn --reset-contextvars": [
        *("-m", "uvicorn", "served_app:service", "--port", "{port}", "--reset-contextvars", "--log-level", "warning")
    ],
    "hypercorn asyncio": ["-m", "hypercorn", "served_app:service", "--bind", "127.0.0.1:{port}"],
    "hypercorn uvloop": ["-m", "hypercorn", "served_app:service", "--bind", "127.0.0.1:{port}", "-k", "uvloop"],
    "granian": ["-m", "granian", "--interface", "asgi", "--port", "{port}", "served_app:service"],
    "granian asyncio": [
        "-m",
        "granian",
        "--interface",
        "asgi",
        "--loop",
        "asyncio",
        "--port",
        "{port}",
        "served_app:service",
    ],
    "gunicorn asgi": ["-m", "gunicorn", "-k", "asgi", "-b", "127.0.0.1:{port}", "served_app:service"],
    "gunicorn uvicorn": [
        *("-m", "gunicorn", "-k", "uvicorn_worker.UvicornWorker", "-b", "127.0.0.1:{port}", "served_app:service")
    ],
}

WORKERS: dict[str, list[str]] = {
    "uvicorn": [*ASGI["uvicorn asyncio h11"], "--workers", "2"],
    "hypercorn": [*ASGI["hypercorn asyncio"], "--workers", "2"],
    "granian": [*ASGI["granian"], "--workers", "2"],
    "gunicorn asgi --preload": [*ASGI["gunicorn asgi"], "--workers", "2", "--preload"],
    "gunicorn uvicorn --preload": [*ASGI["gunicorn uvicorn"], "--workers", "2", "--preload"],
}

WSGI: dict[str, list[str]] = {
    "gunicorn sync": ["-m", "gunicorn", "-b", "127.0.0.1:{port}", "served_app:wsgi_service"],
    "gunicorn gthread": [
        *("-m", "gunicorn", "-k", "gthread", "--threads", "4", "-b", "127.0.0.1:{port}", "served_app:wsgi_service")
    ],
    "gunicorn gevent": ["-m", "gunicorn", "-k", "gevent", "-b", "127.0.0.1:{port}", "served_app:wsgi_service"],
    "granian wsgi": ["-m", "granian", "--interface", "wsgi", "--port", "{port}", "served_app:wsgi_service"],
}


# How a server is told not to wait for its requests when it ends.
IMPATIENT: dict[str, list[str]] = {
    "uvicorn": ["--timeout-graceful-shutdown", "1"],
    "hypercorn": ["--graceful-timeout", "1"],
    "granian": ["--workers-kill-timeout", "5"],
    "gunicorn": ["--graceful-timeout", "1"],
}


async def use_well(connection: Connection, times: int) -> None:
    """Requests on a connection that stays open."""
    for number in range(times):
        for path, body in [("/work", b"abc"), ("/health", b""), ("/stream", b"x"), ("/work", UPLOAD)]:
            answer = await connection.ask(path, body)
            assert answer.status == 200, answer
            assert answer.json["ok"], (path, number, answer)
        refused = await connection.ask("/big", b"")
        assert refused.status == 413, refused
        if refused.headers.get("connection") == "close":
            return


async def go_away(port: int, seed: int) -> None:
    """A request that its client leaves at a random place."""
    draw = random.Random(seed)
    async with connected(port) as connection:
        path, where = draw.choice(
            [("/work", "upload"), ("/stream", "upload"), ("/stream", "answer"), ("/hang", "wait")]
        )
        connection.write(path, UPLOAD, cut=draw.randrange(1, len(UPLOAD)) if where == "upload" else None)
        await connection.writer.drain()
        if where == "answer":
            await connection.reader.read(1)


async def scenario(port: int, *, pipelines: bool = True) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    async with asyncio.timeout(3 * PATIENCE_S), asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(well(port, 5))
            group.create_task(go_away(port, seed + number))
    if pipelines:
        asked = [
            ("/work", b"a"),
            ("/health", b""),
            ("/work", UPLOAD),
            ("/health", b""),
            ("/stream", b"b"),
            ("/work", b""),
        ]
        async with connected(port) as connection:
            for answer in await connection.pipeline(asked):
                assert answer.json["ok"], answer


async def well(port: int, times: int) -> None:
    async with connected(port) as connection:
        await use_well(connection, times)


@pytest.mark.parametrize("server", ASGI)
def test_behind_each_server_every_array_is_in_its_own_request(server: str) -> None:
    async def main(port: int) -> None:
        await scenario(port, pipelines=not server.startswith("gunicorn asgi"))
        counted = await counts_when(port, lambda counts: counts["ended"] == counts["begun"] and counts["begun"] > 500)
        print(counted)
        assert counted.get("wrong", 0) == 0
        assert counted.get("escaped", 0) == 0, "threads and tasks computed, and nobody kept"
        assert counted["refused"] == 200

    with served(ASGI[server]) as port:
        asyncio.run(main(port))


@pytest.mark.parametrize("server", ASGI)
def test_a_server_that_ends_tells_of_each_of_its_requests_once(server: str, tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    ends.touch()
    hanging = 5

    async def main(port: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(hanging):
                connection = await stack.enter_async_context(connected(port))
                connection.write("/hang")
                await connection.writer.drain()
            async with asyncio.timeout(PATIENCE_S):
                while ends.read_text().count("/hang begun") < hanging:  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.02)
            kept.append(stack.pop_all())

    kept: list[contextlib.AsyncExitStack] = []
    with asyncio.Runner() as runner:
        command = [*ASGI[server], *IMPATIENT[server.partition(" ")[0]]]
        with served(command, CTXALLOC_TEST_ENDS=str(ends)) as port:
            runner.run(main(port))
        lines = ends.read_text().splitlines()
        runner.run(kept[0].aclose())
    said = [line for line in lines if line.startswith("/hang") and line != "/hang begun"]
    print(said)
    if server.startswith(("granian", "gunicorn")):
        assert len(said) <= hanging, "they kill workers whose requests hang: then nobody is left who could say so"
    else:
        assert len(said) == hanging


@pytest.mark.parametrize("server", WORKERS)
def test_with_several_workers_each_keeps_its_requests_apart(server: str) -> None:
    async def main(port: int) -> None:
        await scenario(port, pipelines=False)
        pids = set()
        for _ in range(60):
            counted = await counts_when(port, lambda counts: counts["ended"] == counts["begun"])
            assert counted.get("wrong", 0) == 0
            pids.add(counted["pid"])
        assert pids

    with served(WORKERS[server]) as port:
        asyncio.run(main(port))


@pytest.mark.parametrize("server", WSGI)
def test_behind_wsgi_servers_every_step_is_in_its_own_request(server: str) -> None:
    async def main(port: int) -> None:
        for _ in range(3):
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(each_once(port))
        counted = await counts_when(port, lambda counts: counts["ended"] == counts["begun"])
        assert counted.get("wrong", 0) == 0
        assert counted["refused"] == 12

    async def each_once(port: int) -> None:
        for path, body in [("/work", b"abc"), ("/health", b""), ("/stream", b"x"), ("/work", UPLOAD)]:
            async with connected(port) as connection:
                answer = await asyncio.wait_for(connection.ask(path, body), 60)
                assert answer.json["ok"], (path, answer)
        async with connected(port) as connection:
            assert (await connection.ask("/big", b"")).status == 413

    with served(WSGI[server]) as port:
        asyncio.run(main(port))


# How a server is told to keep idle connections, as many as they are.
PATIENT: dict[str, list[str]] = {
    "uvicorn": ["--timeout-keep-alive", "600"],
    "hypercorn": ["--keep-alive", "600"],
    # A minute is the most; and by default no more connections at a time than fit into its backlog of 1024.
    "granian": ["--http1-header-read-timeout", "60000", "--backlog", "20000"],
    "gunicorn": ["--keep-alive", "600", "--worker-connections", "20000"],
}


def patient(server: str) -> list[str]:
    return [*ASGI[server], *PATIENT[server.partition(" ")[0]]]


@pytest.mark.parametrize("server", ASGI)
def test_1000_clients_at_a_time_are_kept_apart(server: str) -> None:
    clients = 1000

    async def main(port: int) -> None:
        all_connected = asyncio.Barrier(clients)

        async def one(number: int) -> None:
            async with connected(port) as connection:
                await all_connected.wait()
                for body in (b"abc" * (number % 50), UPLOAD[:: 1 + number % 7]):
                    answer = await connection.ask("/work", body)
                    assert answer.json["ok"], answer
                    assert answer.json["length"] == len(body)

        async with asyncio.timeout(5 * PATIENCE_S), asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(one(number))
        counted = await counts_when(port, lambda counts: counts["ended"] == counts["begun"])
        print(counted)
        assert counted.get("wrong", 0) == 0
        assert counted["completed"] == 2 * clients

    with served(patient(server)) as port:
        asyncio.run(main(port))


@pytest.mark.parametrize("server", ASGI)
def test_many_requests_and_5000_idle_connections_leave_no_growth(server: str) -> None:
    """Idle connections stay: each may hold the Context of its last request."""
    # asyncio keeps up to a hundred cancelled timers, or as many as are pending, with the Contexts that they were made
    # in: those of connections that are closed. They do not grow with requests: 300 on hypercorn after 2000 and after
    # 10,000 of them, and the request that asks may be one more.
    timers = 300 + 1
    at_once = 1 if server.startswith("gunicorn asgi") else 5  # it takes no pipelines

    def many(port: int, count: int) -> None:
        command = [
            sys.executable,
            str(Path(__file__).with_name("crowd.py")),
            str(port),
            str(count),
            "100",
            str(at_once),
        ]
        subprocess.run(command, check=True, timeout=60 + count / 50)

    async def main(port: int) -> None:
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        many(port, max(REQUESTS // 10, 1000))
        before = await counts_when(port, lambda counts: counts["ended"] == counts["begun"])
        many(port, REQUESTS)
        after = await counts_when(port, lambda counts: counts["ended"] == counts["begun"])
        print(server, before, after)
        assert after["ended"] >= REQUESTS
        assert after.get("wrong", 0) == 0
        assert after["present"] <= timers
        # From 100,000 on not even the smallest object for each: 48 bytes, with its collector's head.
        allowed = 40 * REQUESTS if REQUESTS >= 100_000 else 12 * 2**20
        assert after["rss"] < before["rss"] + allowed, "it grows with the number of requests"

        async def one_more() -> None:
            pair = await asyncio.open_connection("127.0.0.1", port)
            idle.append(pair)
            assert (await Connection(*pair).ask("/work", b"abc")).json["ok"]

        for _ in range(IDLE // 100):
            await asyncio.gather(*(one_more() for _ in range(100)))
        held = await counts_when(port, lambda counts: counts["ended"] == counts["begun"])
        print(held)
        assert held["present"] <= IDLE + timers
        for pair in idle[:: IDLE // 10]:
            assert (await Connection(*pair).ask("/big")).status == 413, "a limit is off"
        for _, writer in idle:
            writer.close()
        # hypercorn keeps a connection until its keep-alive is over, also where the client has closed it.
        left = IDLE + timers if server.startswith("hypercorn") else timers
        counted: Any = await counts_when(port, lambda counts: counts["present"] <= left)
        assert counted["refused"] == 10

    with served(patient(server)) as port:
        asyncio.run(main(port))
