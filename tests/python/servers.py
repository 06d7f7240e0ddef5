"""Real servers, started as processes, and a client that keeps connections, pipelines, uploads and goes away."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE_S = 60


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextlib.contextmanager
def served(command: Sequence[str], *, folders: Sequence[str] = (), **environment: str) -> Iterator[int]:
    """Start a server; `{port}` in its command is a free port, which is given when it answers. Ends all of it."""
    port = free_port()
    path = os.pathsep.join([str(HERE), *folders, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, *(word.format(port=port) for word in command)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            asyncio.run(_until_it_answers(process, port))
            yield port
        except BaseException:
            said.seek(0)
            print(said.read().decode()[-4000:])
            raise
        finally:
            process.terminate()  # it ends its workers itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while process.poll() is None:
            with contextlib.suppress(OSError, EOFError):
                async with connected(port) as connection:
                    await connection.ask("/health")
                    return
            await asyncio.sleep(0.05)
    raise RuntimeError(f"{process.args} ended with {process.returncode}")


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, path: str, body: bytes = b"", cut: int | None = None) -> None:
        """Send a request; or `cut` bytes of it."""
        head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self.writer.write((head + body)[:cut])

    async def read(self) -> Answer:
        """The next answer. EOFError: the server closed the connection."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {}
        for line in head[1:-2]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int((await self.reader.readuntil(b"\r\n")).decode(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(head[0].split()[1]), headers, body)

    async def ask(self, path: str, body: bytes = b"") -> Answer:
        """One request and its answer."""
        self.write(path, body)
        await self.writer.drain()
        return await self.read()

    async def pipeline(self, asked: Sequence[tuple[str, bytes]]) -> list[Answer]:
        """Several requests at once, and their answers."""
        for path, body in asked:
            self.write(path, body)
        await self.writer.drain()
        return [await self.read() for _ in asked]


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """A connection, closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def counts_when(port: int, is_so: Any) -> dict[str, Any]:
    """What the service counted, as soon as `is_so` of it; servers hear of clients that went away when they do."""
    counted: dict[str, Any] = {}
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with connected(port) as connection:
                    counted = (await connection.ask("/counts")).json
                if is_so(counted):
                    return counted
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(counted) from None
