"""Many requests in a short time, from a process of its own: `python crowd.py PORT REQUESTS CONNECTIONS PIPELINED`.

Each connection stays open and sends its next requests when it has all answers to the last ones. It reads no more of an
answer than it must: each body has to say that its arrays were right, and none may say otherwise. Prints seconds.
"""

import asyncio
import sys
import time
from typing import Any

ASKED = b"POST /work HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\n\r\nabc"
RIGHT, END = b'"ok": true', b'"length": 3}'


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, times: int, pipelined: int) -> None:
        self.left = times
        self.pipelined = pipelined
        self.asks = ASKED * pipelined
        self.answers = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.answers = b""
        self.left -= 1
        self.transport.write(self.asks)

    def data_received(self, data: bytes) -> None:
        self.answers += data
        if self.answers.count(END) < self.pipelined:
            return
        if self.answers.count(RIGHT) != self.pipelined:
            self.done.set_exception(AssertionError(self.answers))
            self.transport.close()
        elif self.left:
            self.ask()
        else:
            self.done.set_result(None)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError(f"closed early, after {self.answers!r}"))


async def crowd(port: int, requests: int, connections: int, pipelined: int) -> None:
    loop = asyncio.get_running_loop()
    times = requests // connections // pipelined
    made = [
        await loop.create_connection(lambda: Client(times, pipelined), "127.0.0.1", port) for _ in range(connections)
    ]
    await asyncio.gather(*(client.done for _, client in made))


if __name__ == "__main__":
    begun = time.perf_counter()
    asyncio.run(crowd(*map(int, sys.argv[1:])))
    print(f"{time.perf_counter() - begun:.1f}")
