"""Whole requests of Django, with views of both kinds under ASGI and WSGI: each greedy one is refused, and no other."""

import asyncio
import random

import pytest
from servers import connected, served
from test_servers import ASGI, WSGI
from test_whole import HERE, command_of, environment

GREEDY = [f"/{view}/{kind}" for view in ("greedy", "async_greedy") for kind in ("small", "big")]
HONEST = [f"/{view}/{kind}" for view in ("honest", "async_honest") for kind in ("small", "big")]
LARGE = [f"/{view}/{what}" for view in ("large", "async_large") for what in ("array", "object", "native")]


async def crowd(port: int, paths: list[str], connections: int = 4) -> list[tuple[str, int]]:
    """Asks for each path on each connection, in another order on each; what was answered other than it should."""

    async def one(number: int) -> list[tuple[str, int]]:
        asked, wrong = random.Random(number).sample(paths, len(paths)), []
        while asked:
            async with connected(port) as connection:
                closes = False
                while asked and not closes:
                    told = await connection.ask(path := asked.pop())
                    closes = told.headers.get("connection") == "close"
                    if told.status != (200 if path in HONEST else 413):
                        wrong.append((path, told.status))
        return wrong

    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(connections)]
    return [wrong for task in tasks for wrong in task.result()]


@pytest.mark.parametrize("name", ["uvicorn asyncio h11", "gunicorn uvicorn"])
def test_under_asgi_each_greedy_view_is_refused_and_no_other(name: str) -> None:
    """What a refused request held was let go of by closing a coroutine that still had to answer: status 500."""
    with served(command_of(ASGI[name], "whole_django"), folders=[HERE], **environment()) as port:
        assert asyncio.run(crowd(port, [*GREEDY, *HONEST, *LARGE, *GREEDY])) == []


@pytest.mark.parametrize("name", ["gunicorn sync", "gunicorn gthread"])
def test_under_wsgi_no_view_passes_its_limit(name: str) -> None:
    """Asgiref runs an asynchronous view on another thread, and carries the Context on by setting its variables."""
    with served(command_of(WSGI[name], "whole_django"), folders=[HERE], **environment()) as port:
        assert asyncio.run(crowd(port, [*LARGE, *LARGE, *LARGE, *HONEST, *GREEDY])) == []
