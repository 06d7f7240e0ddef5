"""A server's thread: a whole request that was given more than its limit there is told, whatever it does afterwards.

Before CPython 3.12 only the main thread can be told between two instructions.
"""

from pathlib import Path

import overlapping_sends
import pytest
from whole_programs import check, needs_library

pytestmark = needs_library

START = """
    import collections, hashlib, traceback
    terms = ctxalloc.request(whole=True, limit_bytes=2 * MiB)
    outcomes, closed = collections.Counter(), []
    def take():
        hashlib.scrypt(b"a", salt=b"b", n=2**12, r=8, p=1)  # OpenSSL's 4 MiB are granted
    def ended(environ, report):
        outcomes[environ["PATH_INFO"], report.outcome] += 1
    def call(service, path):
        said = []
        environ = {
            "REQUEST_METHOD": "GET", "PATH_INFO": path, "SERVER_NAME": "a", "SERVER_PORT": "1",
            "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(), "wsgi.errors": sys.stderr,
        }
        try:
            body = service(environ, lambda status, headers, error=None: said.append(status[:3]))
            try:
                list(body)
            finally:
                getattr(body, "close", int)()
        except ctxalloc.BudgetExceeded:
            said.append("raised")
        return said[-1]
    # Within a generator, which may be suspended, nothing is raised as the call returns that took too much.
    SERVERS = {"plain": call, "generator": lambda service, path: next(call(service, path) for _ in "1")}
    HAS_MADE = sys.argv[1] == "generator" and sys.version_info < (3, 12)
"""


@pytest.mark.long
@pytest.mark.parametrize("server", ["plain", "generator"])
def test_a_thread_of_a_wsgi_server_is_told(server: str) -> None:
    check(
        START
        + """
    from ctxalloc.wsgi import AllocatorMiddleware

    class Body:
        def __init__(self, at):
            self.at, self.left = at, [b"ok"]
        def __iter__(self):
            return self
        def __next__(self):
            if self.at == "/each" or (self.at == "/last" and not self.left):
                take()
            if not self.left:
                raise StopIteration
            return self.left.pop()
        def close(self):
            closed.append(self.at)
            if self.at == "/close":
                take()

    def app(environ, start_response):
        at = environ["PATH_INFO"]
        if at in ("/call", "/list"):
            take()
        start_response("200 OK", [])
        return [b"ok"] if at == "/list" else Body(at)

    service = AllocatorMiddleware(app, default=terms, on_end=ended)
    answers = {}
    def serve():
        for _ in range(20):
            for path in ("/list", "/call", "/each", "/last", "/close", "/none"):
                answers.setdefault(path, set()).add(SERVERS[sys.argv[1]](service, path))
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    whole = {"/list": {"413"}, "/call": {"413"}, "/each": {"413"}, "/last": {"raised"}, "/close": {"raised"}}
    assert answers == {**whole, "/none": {"200"}}, answers
    assert outcomes == {**{(path, "refused"): 20 for path in whole}, ("/none", "completed"): 20}, outcomes
    # In "/call" it is told before the body is made.
    assert collections.Counter(closed) == dict.fromkeys(["/each", "/last", "/close", "/none"], 20), closed
    """,
        server,
    )


@pytest.mark.once
@pytest.mark.parametrize("server", ["plain", "generator"])
def test_a_thread_of_djangos_is_told(server: str) -> None:
    pytest.importorskip("django")
    check(
        START
        + """
    import django, tempfile
    from django.conf import settings
    settings.configure(
        ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware", __name__ + ".taking"],
        CTXALLOC={"default": terms, "on_end": ended}, LOGGING_CONFIG=None, LOGGING={},
    )
    django.setup()
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import FileResponse, HttpResponse, StreamingHttpResponse
    from django.urls import path

    def view(request):
        take()
        return HttpResponse("x")
    def file(request):
        opened.append(tempfile.TemporaryFile())
        return FileResponse(opened[-1])
    def taking(get_response):
        def answer(request):
            response = get_response(request)
            if request.path == "/file":
                take()  # little is asked for afterwards
            return response
        return answer
    def stream(request):
        def parts():
            take()
            yield b"x"
        return StreamingHttpResponse(parts())

    opened, answers = [], {}
    urlpatterns = [path(view.__name__, view) for view in (view, file, stream)]
    service = WSGIHandler()
    def serve():
        for _ in range(20):
            for at in ("/view", "/file", "/stream"):
                answers.setdefault(at, set()).add(SERVERS[sys.argv[1]](service, at))
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert answers == {"/view": {"413"}, "/file": {"413"}, "/stream": {"raised"}}, answers
    assert outcomes == {("/view", "refused"): 20, ("/file", "refused"): 20, ("/stream", "refused"): 20}, outcomes
    assert sum(file.closed for file in opened) >= 15 * HAS_MADE, [file.closed for file in opened]
    """,
        server,
    )


def test_a_generator_on_a_thread_is_told_before_its_caller() -> None:
    check(
        START.replace("sys.argv[1]", "''")
        + """
    def plain(closed):
        try:
            take()
            yield "made"
        except ctxalloc.BudgetExceeded:
            closed.append(True)
            raise
    def at_the_end(closed):
        closed.append(True)
        yield "made"
        take()
    def handles(closed):
        try:
            take()
            yield "made"
        except ctxalloc.BudgetExceeded:
            closed.append(True)
            yield "instead"
    def of_async(body):
        async def generator(closed):
            for part in body(closed):
                yield part
        decorated = terms(generator)
        async def used(closed):
            return [part async for part in decorated(closed)]
        return lambda closed: asyncio.run(used(closed))
    found = collections.Counter()
    def serve():
        for body in (plain, at_the_end, handles):
            for kind, work in ("plain", lambda closed: list(terms(body)(closed))), ("async", of_async(body)):
                for _ in range(10):
                    closed = []
                    try:
                        made = work(closed)
                    except ctxalloc.BudgetExceeded:
                        made = "told"
                    found[body.__name__, kind, str(made), len(closed)] += 1
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    told = [(name, kind) for name in ("plain", "at_the_end") for kind in ("plain", "async")]
    assert all(found[name, kind, "told", 1] == 10 or name == "plain" for name, kind in told), found
    assert all(sum(found[name, kind, "told", n] for n in (0, 1)) == 10 for name, kind in told), found
    assert found["handles", "plain", "['instead']", 1] == 10, found
    """
    )


@pytest.mark.once
def test_an_answer_that_has_only_headers_is_replaced() -> None:
    """Something comes between them and the body: the first step of a stream."""
    check(
        """
    import hashlib
    sys.path.insert(0, sys.argv[1])
    from asgi_calls import call, http
    from ctxalloc.asgi import AllocatorMiddleware

    START = {"type": "http.response.start", "status": 200, "headers": []}
    PART = {"type": "http.response.body", "body": b"a", "more_body": True}
    async def app(scope, receive, send):
        at = scope["path"]
        if at == "/sends":
            await send({**START, "status": 404})
            await send(PART)
            await send({"type": "http.response.body", "body": b"b"})
            return
        await send(START)
        if at == "/headers":
            return
        if at == "/fails":
            raise ValueError(at)
        if at == "/later":
            await send(PART)
        hashlib.scrypt(b"a", salt=b"b", n=2**12, r=8, p=1)  # OpenSSL's 4 MiB are granted
        await send({"type": "http.response.body", "body": b"b"})

    reports = {}
    def ended(scope, report):
        reports[scope["path"]] = (report.outcome, report.status)
    terms = ctxalloc.request(whole=True, limit_bytes=2 * MiB)
    service = AllocatorMiddleware(app, default=terms, on_end=ended)
    answers = {}
    for at in ("/sends", "/takes", "/later", "/headers", "/fails"):
        try:
            client = asyncio.run(call(service, http(at)))
        except (ValueError, ctxalloc.BudgetExceeded) as error:
            answers[at] = type(error)
        else:
            answers[at] = [message.get("status", message.get("body", b"")[:1]) for message in client.sent]
    assert answers == {
        "/sends": [404, b"a", b"b"], "/takes": [413, b"{"], "/later": ctxalloc.BudgetExceeded,
        "/headers": [], "/fails": ValueError,
    }, answers
    assert reports == {
        "/sends": ("completed", 404), "/takes": ("refused", 413), "/later": ("refused", 200),
        "/headers": ("unfinished", None), "/fails": ("failed", None),
    }, reports
    """,
        str(Path(__file__).parent),
    )


@pytest.mark.once
def test_headers_that_wait_are_sent_as_they_were_given() -> None:
    """An application may write its next message into the same dict, or its next headers into the same list."""
    check(
        """
    sys.path.insert(0, sys.argv[1])
    from asgi_calls import call, http
    from ctxalloc.asgi import AllocatorMiddleware

    async def app(scope, receive, send):
        status = 404 if scope["path"] == "/404" else 200
        headers = [(b"a", b"1")]
        message = {"type": "http.response.start", "status": status, "headers": headers}
        await send(message)
        headers.append((b"b", b"2"))
        message.clear()
        message.update(type="http.response.body", body=b"c")
        await send(message)

    for terms in (ctxalloc.request(), ctxalloc.request(whole=True)):
        for path, status in (("/200", 200), ("/404", 404)):
            seen = []
            async def noting(scope, receive, send):
                async def copying(message):
                    seen.append({name: list(it) if name == "headers" else it for name, it in message.items()})
                    await send(message)
                await AllocatorMiddleware(app, default=terms)(scope, receive, copying)
            asyncio.run(call(noting, http(path)))
            assert seen == [
                {"type": "http.response.start", "status": status, "headers": [(b"a", b"1")]},
                {"type": "http.response.body", "body": b"c"},
            ], seen
    """,
        str(Path(__file__).parent),
    )


@pytest.mark.once
def test_no_part_of_the_body_overtakes_the_headers() -> None:
    check(overlapping_sends.PROGRAM, "asyncio")


@pytest.mark.once
def test_a_client_that_has_gone_is_told_of_at_any_message() -> None:
    """The headers go with the first part: where they cannot be sent, the client has gone as well."""
    check(
        """
    from ctxalloc.asgi import AllocatorMiddleware

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})
    async def one(fails_at):
        told, count, ended = [], 0, asyncio.Event()
        def on_end(scope, report):  # when what is alive still has been let go of
            told.append(report.outcome)
            ended.set()
        async def send(message):
            nonlocal count
            count += 1
            if count == fails_at:
                raise ConnectionResetError
        terms = ctxalloc.request(whole=True, limit_bytes=8 * MiB)
        service = AllocatorMiddleware(app, default=terms, on_end=on_end)
        try:
            await service({"type": "http", "path": "/", "method": "GET", "headers": []}, None, send)
        except ConnectionResetError:
            told.append("raised")
        await asyncio.wait_for(ended.wait(), 20)
        return sorted(told)
    told = [asyncio.run(one(fails_at)) for fails_at in range(1, 5)]
    assert told == [["disconnected", "raised"]] * 3 + [["completed"]], told
    """
    )


@pytest.mark.once
def test_who_is_told_of_the_end_is_not_told_of_the_overdraft() -> None:
    """A thread of Django's owed it, and raised it in ``on_end``, which has no request: the report was lost."""
    pytest.importorskip("django")
    check(
        """
    import django, hashlib, logging
    from asgiref.sync import sync_to_async
    from django.conf import settings
    from django.http import HttpResponse
    from django.urls import path
    sys.path.insert(0, sys.argv[1])
    from asgi_calls import Client, http
    logging.disable(logging.CRITICAL)

    async def view(request):
        await sync_to_async(hashlib.scrypt)(b"a", salt=b"b", n=2**13, r=8, p=1)  # OpenSSL's 8 MiB are granted
        return HttpResponse("x")
    class Synchronous:
        sync_capable, async_capable = True, False
        def __init__(self, get_response):
            self.get_response = get_response
        def __call__(self, request):
            return self.get_response(request)
    called, ended, last = [], [], threading.Event()
    def on_end(scope, report):
        try:
            for _ in range(50):
                open("/dev/null").close()
            ended.append((report.outcome, report.status))
        finally:
            called.append(report.outcome)
            if len(called) == 60:
                last.set()
    sys.modules["here"] = sys.modules["__main__"]
    settings.configure(
        ROOT_URLCONF=(path("", view),), ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware", "here.Synchronous"],
        CTXALLOC={"default": ctxalloc.request(whole=True, limit_bytes=4 * MiB), "on_end": on_end},
    )
    django.setup()
    from django.core.asgi import get_asgi_application
    service = get_asgi_application()
    async def one():
        asked, client = iter([{"type": "http.request"}]), Client()
        async def receive():
            return next(asked, None) or await asyncio.Event().wait()  # Django ends what it does for a client that left
        await service(http("/", headers=[(b"host", b"a")]), receive, client.send)
        return client.status
    async def main():
        for _ in range(30):
            assert await asyncio.gather(one(), one()) == [413, 413]
        assert await asyncio.to_thread(last.wait, 60)
    asyncio.run(main())
    assert ended == [("refused", 413)] * 60, (len(called), ended)
    """,
        str(Path(__file__).parent),
    )


@pytest.mark.once
def test_a_cancelled_application_is_not_sought_out_while_it_cleans_up() -> None:
    """A child has taken too much, and nobody was told. A cancellation's step told of it at its first block."""
    check(
        """
    import hashlib
    sys.path.insert(0, sys.argv[1])
    from asgi_calls import Client, http
    from ctxalloc.asgi import AllocatorMiddleware

    cleaned = []
    async def app(scope, receive, send):
        child = asyncio.create_task(
            asyncio.to_thread(hashlib.scrypt, b"a", salt=b"b", n=2**13, r=8, p=1)  # OpenSSL's 8 MiB are granted
        )
        child.add_done_callback(lambda _: scope["taken"].set())
        try:
            await asyncio.Event().wait()
        finally:
            [str(number) for number in range(20)]  # one of ten has a sample among these
            cleaned.append(1)
    service = AllocatorMiddleware(app, default=ctxalloc.request(whole=True, limit_bytes=4 * MiB))
    async def main():
        for _ in range(60):
            client, scope = Client(), http(taken=asyncio.Event())
            task = asyncio.create_task(service(scope, client.receive, client.send))
            await scope["taken"].wait()
            task.cancel()
            [ended] = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError) or client.status == 413, ended
    asyncio.run(main())
    assert len(cleaned) >= 30, len(cleaned)
    """,
        str(Path(__file__).parent),
    )


def test_a_thread_that_makes_no_small_block_is_told_when_the_call_returns():
    """Small numbers are there already, so nothing was asked for at which the thread could look again."""
    check("""
        import hashlib

        told = []

        def work():
            calls = 0
            try:
                with ctxalloc.request(whole=True, limit_bytes=300_000):
                    for calls in range(250):
                        hashlib.scrypt(b"a", salt=b"b", n=2**10, r=8, p=1)  # OpenSSL's 1 MiB is given without the GIL
            except MemoryError:
                told.append(calls)

        for _ in range(20):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert len(told) == 20 and max(told) <= 3, told
    """)


@pytest.mark.parametrize("block", ["with", "async with"])
def test_a_thread_without_a_block_of_its_own_is_told_as_it_goes_on(block: str) -> None:
    """Before 3.12 by what its own code asks for: seldom looked for, it was not found in forty calls."""
    check(
        """
    import hashlib
    def work():
        kept = []
        try:
            for number in range(40):
                hashlib.scrypt(b"a", salt=b"b", n=2**12, r=8, p=1)  # OpenSSL's 4 MiB are granted
                kept.append(str(number) + "x" * 100)
        except MemoryError:
            pass
        return len(kept)
    async def main():
        {block} ctxalloc.request(whole=True, limit_bytes=1 * MiB):
            try:
                return await asyncio.to_thread(work)
            except MemoryError:
                return 0
    for _ in range(10):
        try:
            calls = asyncio.run(main())
        except ctxalloc.BudgetExceeded:
            calls = 0
        assert calls < 30, calls
    """.replace("{block}", block)
    )
