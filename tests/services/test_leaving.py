"""Clients that go away while they are answered: what each server lets an application know, and what the report says.

`hears` asks `receive` and answers nevertheless; `streams` is Starlette's stream, that listens while it sends; `deaf`
sends parts and never asks, and neither does the WebSocket of `ticks`. docs/services.md says which of them each server
tells of, and these tests hold it.
"""

import asyncio
from pathlib import Path

import pytest
import websockets
from servers import PATIENCE_S, connected, served

from test_servers import ASGI  # isort: skip

SERVERS = ("uvicorn asyncio h11", "uvicorn uvloop httptools", "hypercorn asyncio", "granian", "gunicorn asgi")


async def leave(port: int, path: str) -> None:
    async with connected(port) as connection:
        connection.write(path)
        await connection.writer.drain()
        if path != "/hears":
            await connection.reader.readexactly(1000)
        await asyncio.sleep(0.1)


async def ends_of(port: int, ends: Path, path: str) -> set[str]:
    """The outcomes of three requests whose clients left."""
    await asyncio.gather(*(leave(port, path) for _ in range(3)))
    async with asyncio.timeout(PATIENCE_S):
        while len(said := outcomes(ends, path)) < 3:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.02)
    return set(said)


def outcomes(ends: Path, path: str) -> list[str]:
    return [line.split()[1] for line in ends.read_text().splitlines() if line.startswith(path)]


@pytest.mark.parametrize("application", ["bare", "based"])
@pytest.mark.parametrize("server", SERVERS)
def test_of_a_client_that_left_the_report_says_what_the_server_told(
    server: str, application: str, tmp_path: Path
) -> None:
    ends = tmp_path / "ends"
    ends.touch()
    command = [word if not word.startswith("served_app:") else f"routed_app:{application}" for word in ASGI[server]]
    with served(command, CTXALLOC_TEST_ENDS=str(ends)) as port:
        said = {path: asyncio.run(ends_of(port, ends, path)) for path in ("/hears", "/streams", "/deaf")}
    streams = "completed" if server == "gunicorn asgi" else "disconnected"
    assert said == {"/hears": {"disconnected"}, "/streams": {streams}, "/deaf": {"completed"}}


async def leave_websocket(port: int) -> None:
    async with websockets.connect(f"ws://127.0.0.1:{port}/ticks") as connection:
        assert await connection.recv() == "tick"


@pytest.mark.parametrize("library", ["websockets", "wsproto"])
@pytest.mark.parametrize("application", ["bare", "based"])
def test_a_websocket_that_only_sends_hears_that_its_client_left(application: str, library: str, tmp_path: Path) -> None:
    """It is `send` that says so: uvicorn's raises OSError."""
    ends = tmp_path / "ends"
    ends.touch()
    command = ["-m", "uvicorn", f"routed_app:{application}", "--port", "{port}", "--ws", library]
    with served(command, CTXALLOC_TEST_ENDS=str(ends)) as port:
        asyncio.run(leave_websocket(port))

        async def said() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not outcomes(ends, "/ticks"):  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.02)

        asyncio.run(said())
    assert outcomes(ends, "/ticks") == ["disconnected"]
