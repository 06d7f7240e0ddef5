"""Raw paths and methods, as strangers write them, over sockets: whoever reaches a view has that view's terms.

Each server reads a request line in its own way before a framework reads the path. `CTXALLOC_PATHS` is how many requests
each server gets (200 by default).
"""

import asyncio
import os
import random

import pytest
from servers import connected, served

from test_servers import ASGI, WSGI  # isort: skip

PATHS = int(os.environ.get("CTXALLOC_PATHS", "200"))
PIECES = (
    *(
        "/",
        "//",
        "a",
        "b",
        "d",
        "x",
        "sub",
        "in",
        "big",
        "1-2",
        "-",
        "%0A",
        "%2F",
        "%2f",
        "%252F",
        "%61",
        "%C3%A9",
        "%ff",
    ),
    *("%", ";p=1", "?q", "?", "#f", "..", "/./", "/../", "\\", "+", "%00", "~", "@", ":", "*"),
)
METHODS = ("GET", "GET", "GET", "HEAD", "POST", "get", "Get", "hEAD", "OPTIONS", "PUT", "post")
KNOWN = ("/a/b", "/a/c", "/big", "/x/y/z", "/d/1-2", "/q/b", "/sub/in/a", "/sub/in/a/b", "/big/", "/x")


def target(chance: random.Random) -> str:
    if chance.random() < 0.6:
        path = chance.choice(KNOWN)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(path) + 1)
            path = path[:at] + chance.choice(PIECES) + path[at:]
    else:
        path = "/" * (chance.random() < 0.9) + "".join(chance.choice(PIECES) for _ in range(chance.randrange(6)))
    return chance.choice(["", "", "", "", "http://test", "http://other:80/", "//test"]) + path or "/"


async def ask(port: int, method: str, target: str) -> dict[str, str]:
    async with asyncio.timeout(30), connected(port) as connection:
        head = f"{method} {target} HTTP/1.1\r\nhost: test\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        connection.writer.write(head.encode("latin-1"))
        try:
            answer = await connection.reader.readuntil(b"\r\n\r\n")
        except (EOFError, OSError):  # the server will have none of it
            return {}
        lines = [line.partition(":") for line in answer.decode("latin-1").split("\r\n")[1:-2]]
        return {name.lower(): value.strip() for name, _, value in lines}


async def scenario(port: int) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    reached: dict[str, int] = {}
    asked = [("GET", path) for path in KNOWN]
    for _ in range(0, PATHS, 10):
        for one, found in zip(asked, await asyncio.gather(*(ask(port, *one) for one in asked)), strict=True):
            if "x-route" in found:
                reached[found["x-route"]] = reached.get(found["x-route"], 0) + 1
                assert found["x-terms"] == found["x-route"], (seed, one)
        asked = [(chance.choice(METHODS), target(chance)) for _ in range(10)]
    assert len(reached) > 3, (seed, reached)


def of(command: list[str], application: str) -> list[str]:
    return [word if not word.startswith("served_app:") else f"routed_app:{application}" for word in command]


SERVED = [
    *((server, ASGI[server], "starlette") for server in ASGI if server not in ("hypercorn uvloop", "granian asyncio")),
    *((server, WSGI[server], framework) for server in WSGI for framework in ("flask_wsgi", "django_wsgi")),
    *((server, ASGI[server], "django_asgi") for server in ("uvicorn asyncio h11", "granian", "hypercorn asyncio")),
]


@pytest.mark.parametrize(
    ("command", "application"), [one[1:] for one in SERVED], ids=[f"{server} {what}" for server, _, what in SERVED]
)
def test_whoever_reaches_a_view_by_a_raw_path_has_its_terms(command: list[str], application: str) -> None:
    with served(of(command, application), CTXALLOC_TEST_ENDS="") as port:
        asyncio.run(scenario(port))
