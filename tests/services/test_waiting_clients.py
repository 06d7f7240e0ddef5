"""Clients whose requests wait in line behind real servers: one that goes away leaves it, one that stays is served."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import connected, counts_when, served

from test_servers import ASGI  # isort: skip

SERVERS = [name for name in ASGI if name != "uvicorn --reset-contextvars"]
LARGE = 300_000


@contextlib.contextmanager
def waiting_service(server: str) -> Iterator[int]:
    command = [word if not word.startswith("served_app:") else "waiting_app:service" for word in ASGI[server]]
    with served(command, folders=[str(Path(__file__).parent)]) as port:
        yield port


async def ask(port: int, path: str) -> None:
    async with connected(port) as connection:
        await connection.ask(path)


@pytest.mark.parametrize("server", SERVERS)
def test_a_client_whose_body_has_come_leaves_the_line_when_it_goes(server: str) -> None:
    async def main(port: int) -> None:
        async with connected(port) as first, contextlib.AsyncExitStack() as leaving:
            first.write("/work")
            await counts_when(port, lambda counted: counted["working"] == 1)
            for size in (0, 10, 10_000):
                connection = await leaving.enter_async_context(connected(port))
                connection.write("/work", bytes(size))
            await counts_when(port, lambda counted: counted["waiting"] == 3)
            await leaving.aclose()
            counted = await counts_when(port, lambda counted: counted["waiting"] == 0)
            assert (counted["working"], counted["ends"]) == (1, {"disconnected": 3})
            await ask(port, "/release")
            assert (await first.read()).body == b"0"

    with waiting_service(server) as port:
        asyncio.run(main(port))


@pytest.mark.parametrize("server", SERVERS)
def test_one_that_waits_with_a_long_body_is_served_after_a_collection(server: str) -> None:
    """Behind gunicorn's ASGI worker nobody refers to the task of a connection that is not read from meanwhile."""

    async def one(port: int) -> bytes:
        async with connected(port) as connection:
            return (await connection.ask("/work", bytes(LARGE))).body

    async def main(port: int) -> None:
        tasks = [asyncio.create_task(one(port)) for _ in range(4)]
        await counts_when(port, lambda counted: (counted["working"], counted["waiting"]) == (1, 3))
        await asyncio.sleep(0.2)  # what a server reads ahead it has read
        await ask(port, "/collect")
        await ask(port, "/release")
        assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == [b"%d" % LARGE] * 4
        await counts_when(port, lambda counted: counted["ends"] == {"completed": 4})

    with waiting_service(server) as port:
        asyncio.run(main(port))
