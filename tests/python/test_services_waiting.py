"""Routes whose requests reserve memory: they wait in line before the application is called, under every middleware."""

import asyncio
import io
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from asgi_calls import Client, answer, http, websocket
from rooms import until_soon

import ctxalloc
from ctxalloc import Budget, request
from ctxalloc.asgi import AllocatorMiddleware
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware

pytestmark = pytest.mark.any_numpy

LENGTH = 1000


def is_as_new(budget):
    return (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)


def terms(budget, size=600, **more):
    return request(budget=budget, reserve_bytes=size, **more)


class Staying(Client):
    """A client that waits for its answer."""

    async def receive(self) -> Any:
        if not self.messages:
            await asyncio.Event().wait()
        return await super().receive()


async def call(app, scope, *messages):
    client = Staying(messages or ({"type": "http.request", "body": b"", "more_body": False},))
    await app(scope, client.receive, client.send)
    return client


class Reports(list):
    """What ``on_end`` is told."""

    def __call__(self, scope: Any, report: Any) -> None:
        self.append(report)

    @property
    def outcomes(self) -> list[str]:
        return [report.outcome for report in self]


def test_requests_wait_in_line_before_the_application_is_called():
    budget, called = Budget(LENGTH), []

    async def app(scope, receive, send):
        own = scope["ctxalloc.request"]
        assert ctxalloc.current_request() == own
        assert budget.reserved_bytes <= LENGTH
        called.append((scope["path"], (await receive())["body"]))
        await asyncio.sleep(0)
        await answer(send)

    reports = Reports()
    service = AllocatorMiddleware(app, routes={"/{n}": terms(budget)}, on_end=reports)

    async def main():
        async with terms(budget, root=True):
            body = {"type": "http.request", "more_body": False}
            tasks = [asyncio.create_task(call(service, http(f"/{n}"), {**body, "body": b"%d" % n})) for n in range(9)]
            await until_soon(lambda: budget.waiting == 9)
            assert called == []
        clients = await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert [client.status for client in clients] == [200] * 9

    asyncio.run(main())
    assert called == [(f"/{n}", b"%d" % n) for n in range(9)]
    assert reports.outcomes == ["completed"] * 9
    assert is_as_new(budget)


def test_without_answers_the_error_passes():
    budget = Budget(LENGTH)
    service = AllocatorMiddleware(answer, routes={"/": terms(budget, LENGTH + 1)}, answers=False)
    with pytest.raises(ctxalloc.NoRoom, match="can never be reserved"):
        asyncio.run(call(service, http()))
    assert is_as_new(budget)


def test_a_handler_for_budget_exceeded_answers_it():
    budget = Budget(LENGTH)
    starlette = pytest.importorskip("starlette.applications")
    responses = pytest.importorskip("starlette.responses")

    async def own(_, error):
        return responses.PlainTextResponse(error.reason, 507)

    app = starlette.Starlette(exception_handlers={ctxalloc.BudgetExceeded: own})
    app.add_middleware(AllocatorMiddleware, routes={"/": terms(budget, LENGTH + 1)})
    client = asyncio.run(call(app, http()))
    assert (client.status, client.body) == (507, b"never fits")
    assert is_as_new(budget)


@pytest.mark.parametrize("scope", [http(), websocket()])
def test_a_client_that_goes_away_leaves_the_line(scope):
    budget, reports = Budget(LENGTH), Reports()

    async def app(scope, receive, send):
        pytest.fail("its client has gone")

    service = AllocatorMiddleware(app, routes={"/": terms(budget)}, on_end=reports)
    opening = {"type": "http.request", "body": b"", "more_body": False}
    if scope["type"] == "websocket":
        opening = {"type": "websocket.connect"}

    class Leaving(Client):
        left = asyncio.Event()

        async def receive(self):
            if not self.messages:
                await self.left.wait()
            return await super().receive()

    async def main():
        Leaving.left = asyncio.Event()
        client = Leaving([opening])
        async with terms(budget, root=True):
            task = asyncio.create_task(service(scope, client.receive, client.send))
            await until_soon(lambda: budget.waiting == 1)
            client.left.set()
            await asyncio.wait_for(task, 20)
            assert (budget.waiting, budget.reserved_bytes, client.sent) == (0, 600, [])
        assert len(asyncio.all_tasks()) == 1, "nobody listens any more"

    asyncio.run(main())
    assert reports.outcomes == ["disconnected"]
    assert is_as_new(budget)


def test_a_cancelled_one_leaves_no_trace_and_no_task_and_is_told():
    budget, reports = Budget(LENGTH), Reports()
    service = AllocatorMiddleware(answer, routes={"/": terms(budget)}, on_end=reports)

    async def never():
        await asyncio.Event().wait()

    async def main():
        async with terms(budget, root=True):
            task = asyncio.create_task(service(http(), never, never))
            await until_soon(lambda: budget.waiting == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert budget.waiting == 0
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        assert ctxalloc.current_request() is None

    asyncio.run(main())
    assert reports.outcomes == ["cancelled"]
    assert isinstance(reports[0].error, asyncio.CancelledError)
    assert is_as_new(budget)


def test_one_whose_coroutine_is_closed_while_it_waits_is_told():
    budget, reports = Budget(LENGTH), Reports()
    service = AllocatorMiddleware(answer, routes={"/": terms(budget)}, on_end=reports)

    async def never():
        await asyncio.Event().wait()

    async def main():
        async with terms(budget, root=True) as around:
            coroutine = service(http(), never, never)
            coroutine.send(None)
            assert budget.waiting == 1
            coroutine.close()
            assert (budget.waiting, reports.outcomes) == (0, ["cancelled"])
            assert ctxalloc.current_request() == around, "nothing is left selected"
        await asyncio.sleep(0)

    asyncio.run(main())
    assert is_as_new(budget)


def test_one_without_a_reservation_is_none_of_those_that_have_ended():
    """Its peak of 0 would say that requests of its route need nothing."""
    budget, route = Budget(LENGTH), "/uncounted/{rest}"

    def numbers():
        series = ctxalloc.metrics.snapshot().series[route]
        return series.requests, series.timed_out, series.peak_bytes.count, series.refused_peak_bytes.count

    async def app(scope, receive, send):
        await answer(send)

    async def main():
        service = AllocatorMiddleware(app, routes={route: terms(budget, timeout=0.001)})
        assert (await call(service, http("/uncounted/1"))).status == 200
        assert numbers() == (1, 0, 1, 0)
        async with terms(budget, root=True):
            assert (await call(service, http("/uncounted/2"))).status == 503
        assert numbers() == (1, 1, 1, 0)

    asyncio.run(main())
    service = WsgiMiddleware(lambda *_: pytest.fail("no room"), routes={route: terms(budget, timeout=0)})
    with terms(budget, root=True):
        wsgi_call(service, "/uncounted/3")
    assert numbers() == (1, 2, 1, 0)


def wsgi_call(service, path="/"):
    told: list[Any] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "wsgi.input": io.BytesIO()}
    body = service(environ, lambda status, headers, exc_info=None: told.extend((status, dict(headers))))
    content = b"".join(body)
    if hasattr(body, "close"):
        body.close()
    return told, content


def test_a_thread_of_wsgi_waits_in_line():
    budget, reports, seen = Budget(LENGTH), Reports(), []

    def app(environ, start_response):
        seen.append(budget.reserved_bytes)
        start_response("200 OK", [])
        return [b"done"]

    service = WsgiMiddleware(app, routes={"/": terms(budget)}, on_end=reports)
    with terms(budget, root=True):
        threads = [threading.Thread(target=wsgi_call, args=(service,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while budget.waiting < 3:
            assert time.monotonic() < deadline, "they never came"
            time.sleep(0.001)
        assert seen == []
    for thread in threads:
        thread.join(20)
    assert seen == [600] * 3
    assert reports.outcomes == ["completed"] * 3
    assert is_as_new(budget)


def test_flasks_client_gets_the_answer_of_one_that_gets_no_room():
    """PEP 3333: ``start_response`` gets an exception only to replace headers; a test client raises it."""
    flask = pytest.importorskip("flask")
    budget, app = Budget(LENGTH), flask.Flask(__name__)
    app.add_url_rule("/", view_func=lambda: "ok")
    app.wsgi_app = WsgiMiddleware(app.wsgi_app, routes={"/": terms(budget, timeout=0)})
    with terms(budget, root=True):
        answered = app.test_client().get("/")
    assert (answered.status_code, answered.headers["retry-after"]) == (503, "1")
    assert app.test_client().get("/").text == "ok"


@pytest.mark.parametrize("has_heard", [False, True])
def test_only_headers_that_wsgi_has_heard_are_replaced_with_exception(has_heard):
    told = []

    def app(environ, start_response):
        start_response("200 OK", [])
        if has_heard:
            yield b""  # nothing is sent with it
        yield bytes(np.empty(100_000))

    service = WsgiMiddleware(app, default=request(limit_bytes=1000, strict=True))
    body = service({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, lambda *given: told.append(given))
    assert b"".join(body).startswith(b"{")
    assert [given[0][:3] for given in told] == ["200", "413"][not has_heard :]
    assert [len(given) for given in told] == [2, 3] if has_heard else [2]
    assert not has_heard or issubclass(told[1][2][0], MemoryError)


def test_write_of_wsgi_has_the_server_hear_the_headers_first():
    told = []

    def app(environ, start_response):
        write = start_response("200 OK", [])
        assert not told
        write(b"a")
        return [b"b"]

    def start_response(status, headers):
        told.append(status)
        return told.append

    service = WsgiMiddleware(app, default=request())
    body = service({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, start_response)
    assert (told, list(body)) == (["200 OK", b"a"], [b"b"])


DJANGO = """
import asyncio, ctxalloc, django
from django.conf import settings
from django.http import HttpResponse
from django.urls import path

budget = ctxalloc.Budget(1000)
reports = []
terms = ctxalloc.request(budget=budget, reserve_bytes=600, timeout=0.2)
settings.configure(
    ROOT_URLCONF=__name__, SECRET_KEY="-", ALLOWED_HOSTS=["*"], MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware"],
    CTXALLOC={"default": terms, "on_end": lambda scope, report: reports.append(report.outcome)},
)
django.setup()

def plain(request):
    return HttpResponse(f"{budget.reserved_bytes} {request.META['ctxalloc.request'] == ctxalloc.current_request()}")

async def awaited(request):
    return plain(request)

urlpatterns = [path("plain", plain), path("awaited", awaited)]

from django.test import AsyncClient, Client

def check(get):
    answer = get()
    assert (answer.status_code, answer.content) == (200, b"600 True"), (answer.status_code, answer.content)
    with ctxalloc.request(budget=budget, reserve_bytes=500, root=True):
        answer = get()
    assert (answer.status_code, answer["retry-after"]) == (503, "1"), answer
    assert (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)

for view in ("/plain", "/awaited"):
    check(lambda: Client().get(view))
    check(lambda: asyncio.run(AsyncClient().get(view)))
assert reports == ["completed", "refused"] * 4, reports

async def cancel():
    async with ctxalloc.request(budget=budget, reserve_bytes=500, root=True):
        task = asyncio.create_task(AsyncClient().get("/awaited"))
        while not budget.waiting:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

reports.clear()
asyncio.run(cancel())
assert reports == ["cancelled"], reports
assert (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)
print("as it must be")
"""


def test_django_waits_in_threads_and_in_tasks(tmp_path):
    pytest.importorskip("django")
    program = tmp_path / "program.py"
    program.write_text(DJANGO)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "as it must be\n", done.stderr


def test_retry_after_is_as_long_as_those_take_who_wait():
    """Those who got room lately say how fast the queue is; before anybody did, the option says it."""
    budget = Budget(LENGTH)
    service = AllocatorMiddleware(served, routes={"/": terms(budget, timeout=0.02)}, retry_after_seconds=2)

    async def refused():
        client = await call(service, http())
        assert client.status == 503
        return int(client.headers["retry-after"])

    async def wait_for_room():
        async with terms(budget, root=True):
            pass

    async def main():
        holder = terms(budget, root=True)
        async with holder:
            assert await refused() == 2
            waiting = asyncio.create_task(wait_for_room())
            await until_soon(lambda: budget.waiting == 1)
            await asyncio.sleep(0.6)
        await waiting
        async with terms(budget, root=True):
            # One had to wait for 0.6 s: the next, who stands behind four, is told to come after five times that.
            waiting = [asyncio.create_task(wait_for_room()) for _ in range(4)]
            await until_soon(lambda: budget.waiting == 4)
            assert 3 <= await refused() <= 6
        await asyncio.gather(*waiting)

    asyncio.run(main())
    assert is_as_new(budget)


async def served(scope, receive, send):
    await answer(send)
