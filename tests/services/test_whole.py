"""`request(whole=True)` behind each server, started with the library before malloc as docs/whole.md says."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from servers import connected, counts_when, served
from test_servers import ASGI, WORKERS, WSGI

from ctxalloc import _native

if _native._whole_library() is None:
    pytest.skip("Linux with glibc, and the feature `whole`", allow_module_level=True)

HERE = str(Path(__file__).parent)
MiB = 1 << 20


def command_of(command: list[str], application: str = "whole_app") -> list[str]:
    return [word.replace("served_app", application) for word in command]


def environment() -> dict[str, str]:
    made = subprocess.run([sys.executable, "-m", "ctxalloc", "whole"], capture_output=True, text=True, check=True)
    return {"LD_PRELOAD": made.stdout.strip(), "CTXALLOC_WHOLE": "1"}


async def crowd(port: int) -> None:
    """Six connections at once: each parses, is refused, and parses again."""

    async def one() -> None:
        asked = [*["/parse"] * 5, "/greedy", "/parse"]
        while asked:
            async with connected(port) as connection:
                closes = False
                while asked and not closes:
                    told = await connection.ask(path := asked.pop(0))
                    closes = told.headers.get("connection") == "close"
                    assert told.status == (413 if path == "/greedy" else 200), told
                    if path == "/parse":
                        assert told.json["rows"] == 20_000
                        assert 4 * MiB < told.json["object_bytes"] < 16 * MiB, told

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(one())


@pytest.mark.parametrize("command", [*ASGI.values(), *WSGI.values()], ids=[*ASGI, *WSGI])
def test_each_request_has_its_own_sum_and_is_refused_alone(command: list[str]) -> None:
    with served(command_of(command), folders=[HERE], **environment()) as port:
        asyncio.run(crowd(port))
        told = asyncio.run(counts_when(port, lambda counts: counts["ended"] >= 42))
    assert told == {"ended": 42, "escaped": 0, "refused": 6}


@pytest.mark.parametrize("command", WORKERS.values(), ids=WORKERS)
def test_workers_of_a_server_count_each(command: list[str]) -> None:
    with served(command_of(command), folders=[HERE], **environment()) as port:
        asyncio.run(crowd(port))
