"""When a request of Django ends: with its response, so that what views put on the HttpRequest has not escaped."""

import pytest
from subprocesses import says

pytestmark = [pytest.mark.any_numpy, pytest.mark.once]
PROJECT = """
import gc, io, pickle
import django, numpy as np, ctxalloc
from ctxalloc import metrics
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.test import RequestFactory
from django.urls import path
gc.disable()
kept, told = [], []

def work(request):
    request.big = np.ones(1000)
    kept.extend([np.ones(10)] * ("keep" in request.GET))

def plain(request): work(request); return HttpResponse("answer")
def stream(request): work(request); return StreamingHttpResponse(iter([b"a", b"b"]))
def file(request): work(request); return FileResponse(io.BytesIO(b"content"))

settings.configure(
    SECRET_KEY="x", ALLOWED_HOSTS=["*"], ROOT_URLCONF=tuple(path(f.__name__, f) for f in (plain, stream, file)),
    MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware"],
    CTXALLOC={"on_end": lambda meta, report: told.append((report.outcome, report.escaped.count))})
django.setup()
application = get_wsgi_application()

def serve(url, wrapper=None, parts=100):
    name, _, query = url.partition("?")
    environ = {**RequestFactory()._base_environ(PATH_INFO=name, QUERY_STRING=query)}
    if wrapper:
        environ["wsgi.file_wrapper"] = wrapper
    body = application(environ, lambda *_: None)
    for _, part in zip(range(parts), body):
        assert not told, told
    body.close()
    del body
    found, told[:] = told[:], []
    return found
"""


def test_what_a_view_puts_on_the_request_has_not_escaped() -> None:
    assert (
        says(
            PROJECT
            + """
from wsgiref.util import FileWrapper
print(serve("/plain"), serve("/stream"), serve("/file"), serve("/file", FileWrapper))
print(serve("/plain?keep"), serve("/stream?keep"), serve("/stream", parts=1))
"""
        )
        == "[('completed', 0)] [('completed', 0)] [('completed', 0)] [('completed', 0)]\n"
        "[('completed', 1)] [('completed', 1)] [('unfinished', 0)]"
    )


def test_a_response_that_nobody_closes_ends_its_request_too() -> None:
    assert (
        says(
            PROJECT
            + """
from ctxalloc.django import AllocatorMiddleware
made = []
def view(request): made.append(StreamingHttpResponse(iter([b"a"])) if made else HttpResponse("")); return made[-1]
middleware = AllocatorMiddleware(view)
for _ in range(2):
    request = RequestFactory().get("/")
    response = middleware(request)
    assert pickle.loads(pickle.dumps(response._resource_closers[-1])) is not None
    assert not told
    made[-1] = response = None
    gc.collect()  # a streamed response of Django's is a cycle
    print(told.pop())
"""
        )
        == "('completed', 0)\n('unfinished', 0)"
    )


def test_an_error_response_that_nobody_closes_ends_its_request() -> None:
    """The exception is kept for the report; its frames lead to the server's, which has the response."""
    program = """
import logging
from ctxalloc import problems
logging.disable()
def failed(request): work(request); 1 / 0
def asks(request):
    try:
        np.ones(10_000_000)
    except MemoryError as error:
        return HttpResponse(status=problems.problem(error).status)

class Parts:
    left = 1
    def __iter__(self): return self
    def __next__(self):
        try:
            np.ones(10_000_000)
        except MemoryError as error:
            assert problems.refusal(error) is not None
        if not self.left:
            raise StopIteration
        self.left = 0
        return b"a"
def streams(request): return StreamingHttpResponse(Parts(), status=503)

settings.ROOT_URLCONF += (path("failed", failed), path("asks", asks), path("streams", streams))
settings.CTXALLOC["default"] = ctxalloc.request(limit_bytes=1_000_000)
application = get_wsgi_application()
for url in ("/failed", "/asks", "/streams"):
    body = application({**RequestFactory()._base_environ(PATH_INFO=url)}, lambda *_: None)
    list(body)
    assert not told
    body = None
    if url == "/streams":
        gc.collect()  # a streamed response of Django's is a cycle
    print(told.pop())
"""
    assert says(PROJECT + program) == "('failed', 0)\n('refused', 0)\n('refused', 0)"


def test_an_asynchronous_response_ends_on_its_loop() -> None:
    assert (
        says(
            PROJECT
            + """
import asyncio
from django.core.asgi import get_asgi_application

async def scenario():
    application = get_asgi_application()
    sent = []
    async def receive():
        if not sent:
            sent.append(None)
            return {"type": "http.request"}
        await asyncio.sleep(100)
    async def send(message): ...
    scope = {"type": "http", "method": "GET", "path": "/plain", "headers": [], "query_string": b""}
    await asyncio.create_task(application(scope, receive, send))
    gc.collect()  # Django leaves a cycle of its own: the exception of the task that waits for the client, its frame
    await asyncio.sleep(0.3)
    print(told.pop(), told)

asyncio.run(scenario())
"""
        )
        == "('completed', 0) []"
    )


def test_djangos_server_gets_the_budget_exceeded_of_a_stream() -> None:
    program = """
def refused(request):
    def parts():
        yield b"a"
        np.ones(10_000_000)
    return StreamingHttpResponse(parts())

settings.ROOT_URLCONF += (path("refused", refused),)
settings.CTXALLOC["default"] = ctxalloc.request(limit_bytes=1_000_000)
application = get_wsgi_application()
try:
    serve_refused = application({**RequestFactory()._base_environ(PATH_INFO="/refused")}, lambda *_: None)
    list(serve_refused)
except ctxalloc.BudgetExceeded as error:
    print(type(error.__cause__).__name__, error.requested_bytes)
serve_refused.close()
print(told)
"""
    assert says(PROJECT + program) == "MemoryError 80000000\n[('refused', 0)]"
