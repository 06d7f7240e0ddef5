"""An upload beyond the limit of a whole request is answered: what a server reads for it is not broken off."""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.once, needs_library]

PROGRAM = """
import asyncio, collections, socket, uvicorn
from ctxalloc.asgi import AllocatorMiddleware

async def app(scope, receive, send):
    held = []
    while True:
        message = await receive()
        held.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    text = str(len(b"".join(held))).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})

def answer(port, size):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            connection.sendall(b"POST / HTTP/1.1\\r\\nhost: a\\r\\ncontent-length: %d\\r\\n\\r\\n" % size)
            for _ in range(size // 50_000):
                connection.sendall(bytes(50_000))
        except OSError:
            pass  # it has answered, and hears no more
        try:
            return connection.recv(1000)[9:12]
        except OSError as error:
            return type(error).__name__

async def main():
    service = AllocatorMiddleware(app, default=ctxalloc.request(whole=True, limit_bytes=8 * MiB))
    config = uvicorn.Config(service, port=0, http=sys.argv[1], loop="asyncio", lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    answers = collections.Counter([await asyncio.to_thread(answer, port, 9_000_000) for _ in range(12)])
    assert answers == {b"413": 12}, answers
    assert await asyncio.to_thread(answer, port, 1_000_000) == b"200"
    server.should_exit = True
    await serving

asyncio.run(main())
"""


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
def test_an_upload_beyond_the_limit_is_answered(protocol: str) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip(protocol)
    check(PROGRAM, protocol)
