"""One request of an ASGI application, without a server: what came in, what was sent."""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Application = Callable[..., Awaitable[None]]


def http(path: str = "/", method: str = "GET", **more: Any) -> Scope:
    """The scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [],
        **more,
    }


def websocket(path: str = "/", **more: Any) -> Scope:
    """The scope of a WebSocket."""
    return {**http(path), "type": "websocket", "subprotocols": [], **more}


class Client:
    """The other side of one call: ``receive`` tells ``messages`` and then a disconnect; ``send`` keeps what it gets."""

    def __init__(
        self, messages: Sequence[Message] = ({"type": "http.request", "body": b"", "more_body": False},)
    ) -> None:
        self.messages = list(messages)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        return self.messages.pop(0) if self.messages else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


async def call(app: Application, scope: Scope, messages: Sequence[Message] | None = None) -> Client:
    """One request; what was sent."""
    client = Client() if messages is None else Client(messages)
    await app(scope, client.receive, client.send)
    return client


async def answer(send: Callable[[Message], Awaitable[None]], body: bytes = b"", status: int = 200) -> None:
    """A whole answer in two messages."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
