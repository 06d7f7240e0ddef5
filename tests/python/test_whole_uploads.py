"""A whole request beyond its limit is answered 413, whatever it was broken off in.

What a server reads for it is not broken off; and what C makes of a refusal is known.
"""

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
    config = uvicorn.Config(service, http=sys.argv[1], loop="asyncio", lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))  # who connects before the server is there waits for it
    port = listening.getsockname()[1]
    serving = asyncio.create_task(server.serve([listening]))
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


def test_what_c_makes_of_a_refusal_is_answered_as_one() -> None:
    """`zlib` has an error of its own, and deep recursion ends with a SystemError. The program's own are left."""
    check("""
        import asyncio, collections, contextlib, zlib
        from ctxalloc.asgi import AllocatorMiddleware
        sys.setrecursionlimit(10**6)
        packed = zlib.compress(bytes(300_000))

        def deep(n):
            return [n, deep(n - 1)] if n else []

        def unpack(size):
            kept = bytes(size)
            zlib.decompressobj().decompress(packed, 1000)

        def corrupt(_):
            with contextlib.suppress(MemoryError):
                bytes(2 * MiB)
            zlib.decompress(b"no zlib")

        outcomes = collections.Counter()
        async def app(scope, receive, send):
            scope["work"](scope["size"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        def ended(scope, report):
            outcomes[scope["work"].__name__, report.outcome] += 1
        terms = ctxalloc.request(whole=True, limit_bytes=MiB)
        service = AllocatorMiddleware(app, default=terms, on_end=ended)

        async def call(work, size):
            async def send(message): pass
            async def receive(): return {"type": "http.request", "body": b"", "more_body": False}
            scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
            with contextlib.suppress(zlib.error):
                await service({**scope, "work": work, "size": size}, receive, send)

        errors = set()
        for size in range(1000 * KiB, 1024 * KiB, 500):
            asyncio.run(call(unpack, size))
            try:
                with ctxalloc.request(whole=True, limit_bytes=MiB):
                    unpack(size)
            except Exception as error:
                errors |= {type(error), type(error.__cause__)}
        assert errors == {ctxalloc.BudgetExceeded, MemoryError, zlib.error}, errors
        assert outcomes["unpack", "refused"] > 20 and not outcomes["unpack", "failed"], outcomes
        for _ in range(10):
            asyncio.run(call(deep, 200_000))
            asyncio.run(call(corrupt, 0))
        assert outcomes["deep", "refused"] == outcomes["corrupt", "failed"] == 10, outcomes
    """)


def test_an_archive_that_does_not_fit_is_a_refusal() -> None:
    """A BytesIO whose growth is refused is closed, and ZipFile says that. The program's own errors are left."""
    check("""
        import contextlib, io, zipfile
        part = os.urandom(65536)

        def plain():
            with zipfile.ZipFile(io.BytesIO(), "w") as archive:
                for number in range(1000):
                    archive.writestr(str(number), part)

        def deflated():
            with zipfile.ZipFile(io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
                for number in range(1000):
                    archive.writestr(str(number), part)

        def left_open():
            archive = zipfile.ZipFile(io.BytesIO(), "w")
            for number in range(1000):
                archive.writestr(str(number), part)

        for work in (plain, deflated, left_open):
            try:
                with ctxalloc.request(whole=True, limit_bytes=8 * MiB):
                    work()
            except ctxalloc.BudgetExceeded as error:
                assert type(error.__cause__) in (ValueError, MemoryError), error.__cause__
            else:
                raise AssertionError(work)

        def own():
            with contextlib.suppress(MemoryError):
                bytes(9 * MiB)
            file = io.BytesIO()
            file.close()
            file.read()

        try:
            with ctxalloc.request(whole=True, limit_bytes=8 * MiB) as request:
                own()
        except ValueError as error:
            assert "closed file" in str(error) and request.stats.refused
        else:
            raise AssertionError("it is the program's own error")
    """)
