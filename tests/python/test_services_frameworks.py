"""Starlette, FastAPI and Flask in our middlewares: errors, background tasks, dependencies. No server."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import numpy as np
import pytest
from asgi_calls import Client, answer, call, http, websocket

for library in ("asgiref", "fastapi", "flask", "starlette"):
    pytest.importorskip(library)

# What is not installed was skipped above.
import fastapi  # noqa: E402
import flask  # noqa: E402
from asgiref.sync import sync_to_async  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.background import BackgroundTask  # noqa: E402
from starlette.middleware.base import BaseHTTPMiddleware  # noqa: E402
from starlette.requests import Request as HttpRequest  # noqa: E402
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse  # noqa: E402
from starlette.routing import Mount, Route, WebSocketRoute  # noqa: E402

import ctxalloc  # noqa: E402
from ctxalloc import Budget, BudgetExceeded, MiB, current, current_request, problems, request  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware, Report  # noqa: E402
from ctxalloc.wsgi import AllocatorMiddleware as WsgiMiddleware  # noqa: E402

pytestmark = pytest.mark.any_numpy

SMALL = request(limit_bytes=MiB)


def big() -> Any:
    return np.empty(10 * MiB, np.uint8)


async def fails(_: HttpRequest) -> PlainTextResponse:
    big()
    return PlainTextResponse("never")


def fails_in_a_thread(_: HttpRequest) -> PlainTextResponse:
    big()
    return PlainTextResponse("never")


ROUTES = [Route("/async", fails), Route("/thread", fails_in_a_thread)]


# ---- Starlette --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("path", ["/async", "/thread"])
@pytest.mark.parametrize("outside", [False, True])
def test_the_applications_own_handler_answers_a_refusal(path: str, *, is_async: bool, outside: bool) -> None:
    async def awaited(_: HttpRequest, error: Exception) -> JSONResponse:
        return called(_, error)

    def called(_: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, BudgetExceeded)
        assert current_request() is None
        return JSONResponse({"wanted": error.requested_bytes}, status_code=599)

    app = Starlette(routes=ROUTES, exception_handlers={BudgetExceeded: awaited if is_async else called})
    service: Any = app
    if outside:
        service = AllocatorMiddleware(app, default=SMALL)
    else:
        app.add_middleware(AllocatorMiddleware, default=SMALL)
    client = asyncio.run(call(service, http(path)))
    assert len(client.sent) == 2
    assert client.status == 599
    assert json.loads(client.body) == {"wanted": 10 * MiB}


def test_a_handler_for_memory_errors_may_ask_which_budget_refused() -> None:
    async def handler(_: HttpRequest, error: Exception) -> PlainTextResponse:
        problem = problems.problem(error)
        assert problem is not None
        refused = problems.refusal(error)
        assert refused is not None
        assert refused.budget == "/async"
        assert problems.refusal(error) is refused
        return PlainTextResponse(problem.body, problem.status, dict(problem.headers))

    app = Starlette(routes=ROUTES, exception_handlers={MemoryError: handler})
    app.add_middleware(AllocatorMiddleware, routes={"/async": SMALL})
    assert asyncio.run(call(app, http("/async"))).status == 413
    assert problems.problem(MemoryError()) is None
    assert problems.problem(BudgetExceeded("a", 10, 10, 5)).status == 503  # type: ignore[union-attr]


@pytest.mark.parametrize("outside", [False, True])
def test_a_handler_for_all_exceptions_does_not_answer_a_refusal(*, outside: bool) -> None:
    async def failed(_: HttpRequest, error: Exception) -> PlainTextResponse:
        return PlainTextResponse("failed", 500)

    app = Starlette(routes=ROUTES, exception_handlers={Exception: failed})
    service: Any = app
    if outside:
        service = AllocatorMiddleware(app, default=SMALL)
    else:
        app.add_middleware(AllocatorMiddleware, default=SMALL)
    assert asyncio.run(call(service, http("/async"))).status == 413


def test_base_http_middleware_between_lets_a_refusal_through() -> None:
    class Between(BaseHTTPMiddleware):
        async def dispatch(self, request: HttpRequest, call_next: Any) -> Any:
            return await call_next(request)

    for paths in ("/async", "/thread"):
        app = Starlette(routes=ROUTES)
        app.add_middleware(Between)
        app.add_middleware(AllocatorMiddleware, default=SMALL)
        assert asyncio.run(call(app, http(paths))).status == 413


def test_a_500_that_has_another_reason_stays_one() -> None:
    async def broken(_: HttpRequest) -> PlainTextResponse:
        raise KeyError("mine")

    service = AllocatorMiddleware(Starlette(routes=[Route("/", broken)]), default=SMALL)
    client = Client()
    with pytest.raises(KeyError):
        asyncio.run(service(http(), client.receive, client.send))
    assert client.status == 500


def test_starlettes_background_task_and_stream_come_where_the_terms_say() -> None:
    tenant = Budget(name="tenant")
    seen: list[tuple[str, int, int]] = []
    reports: list[Report] = []

    async def background() -> None:
        array = np.empty(MiB, np.uint8)
        seen.append(("background", len(reports), tenant.in_use_bytes))
        del array

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            array = np.empty(1000, np.uint8)
            seen.append(("part", len(reports), tenant.in_use_bytes))
            yield bytes(array[:1])

    async def endpoint(_: HttpRequest) -> StreamingResponse:
        return StreamingResponse(parts(), background=BackgroundTask(background))

    app = Starlette(routes=[Route("/", endpoint)])
    app.add_middleware(
        AllocatorMiddleware,
        default=request(after_end="detach"),
        tenant=lambda _: tenant,
        on_end=lambda _, report: reports.append(report),
    )
    begins: list[dict[str, Any]] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not begins:
            await asyncio.Event().wait()  # the client stays
        return begins.pop()

    async def send(message: Any) -> None:
        pass

    asyncio.run(app(http(), receive, send))
    assert [kind for kind, *_ in seen] == ["part"] * 3 + ["background"]
    assert all(ended == 0 and in_use >= 1000 for _, ended, in_use in seen[:3])
    assert seen[3] == ("background", 1, 0)
    assert reports[0].outcome == "completed"


def test_mounts_and_websockets_have_accounts_by_their_whole_path() -> None:
    async def socket(websocket: Any) -> None:
        await websocket.accept()
        await websocket.send_text(current().name)
        await websocket.close()

    async def name(_: HttpRequest) -> PlainTextResponse:
        return PlainTextResponse(current().name)

    app = Starlette(routes=[Mount("/sub", Starlette(routes=[Route("/a", name)])), WebSocketRoute("/ws", socket)])
    app.add_middleware(AllocatorMiddleware, routes={"/sub/a": request(), "/ws": request()})
    assert asyncio.run(call(app, http("/sub/a"))).body == b"/sub/a"
    sent = asyncio.run(call(app, websocket("/ws"), [{"type": "websocket.connect"}])).sent
    assert sent[1]["text"] == "/ws"


# ---- FastAPI ----------------------------------------------------------------------------------------


def test_fastapis_dependency_gives_the_account_to_every_kind_of_endpoint() -> None:
    from ctxalloc.fastapi import Account

    app = fastapi.FastAPI()

    @app.get("/async")
    async def asynchronous(account: Account) -> str:
        assert account == current_request()
        return account.name

    @app.get("/thread")
    def in_a_thread(account: Account) -> str:
        assert account == current_request()
        return account.name

    service = AllocatorMiddleware(app, routes={"/async": request(), "/thread": request()})
    for where in ("/async", "/thread"):
        assert json.loads(asyncio.run(call(service, fastapi_scope(where))).body) == where
    client = Client()
    with pytest.raises(RuntimeError, match="this route has no account"):
        asyncio.run(app(fastapi_scope("/async"), client.receive, client.send))


def test_only_an_async_dependency_with_yield_selects_for_the_endpoint() -> None:
    async def selecting() -> AsyncIterator[None]:
        async with ctxalloc.use("aligned64"):
            yield

    def selecting_in_a_thread() -> Iterator[None]:
        with contextlib.suppress(ValueError), ctxalloc.use("aligned64"):
            yield

    app = fastapi.FastAPI()

    @app.get("/async")
    def one(_: Annotated[None, fastapi.Depends(selecting)]) -> str:
        return current().name

    @app.get("/thread")
    def other(_: Annotated[None, fastapi.Depends(selecting_in_a_thread)]) -> str:
        return current().name

    service = AllocatorMiddleware(app, default=request(name="account"))
    assert asyncio.run(call(service, fastapi_scope("/async"))).body == b'"aligned64"'
    assert asyncio.run(call(service, fastapi_scope("/thread"))).body == b'"account"'


def posted(app: fastapi.FastAPI) -> Client:
    """The answer to a JSON document, by the application in our middleware."""
    scope = {**fastapi_scope("/async"), "method": "POST", "headers": [(b"content-type", b"application/json")]}
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]
    return asyncio.run(call(AllocatorMiddleware(app, default=SMALL), scope, messages))


def test_a_body_that_does_not_fit_is_no_bad_request_of_fastapis() -> None:
    class Parsed(HttpRequest):
        async def json(self) -> Any:
            big()

    class Parsing(fastapi.routing.APIRoute):
        def get_route_handler(self) -> Any:
            handle = super().get_route_handler()

            async def handler(request: HttpRequest) -> Any:
                return await handle(Parsed(request.scope, request.receive))

            return handler

    app = fastapi.FastAPI(openapi_url=None)
    app.router.route_class = Parsing

    @app.post("/async")
    async def never(_: dict[str, int]) -> None: ...

    assert posted(app).status == 413


@pytest.mark.parametrize("status", [400, 422])
def test_an_endpoint_that_answers_a_refusal_itself_does(status: int) -> None:
    app = fastapi.FastAPI(openapi_url=None)

    @app.post("/async")
    async def answers(_: dict[str, int]) -> None:
        try:
            big()
        except MemoryError as error:
            raise fastapi.HTTPException(status) from error

    assert posted(app).status == status


def fastapi_scope(path: str) -> Any:
    return http(
        path, server=("test", 80), client=("test", 1), scheme="http", http_version="1.1", raw_path=path.encode()
    )


# ---- asgiref ----------------------------------------------------------------------------------------


def test_what_sync_to_async_copies_back_does_not_reach_the_next_request() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await sync_to_async(ctxalloc.set_handler)("aligned64")
        assert current().name == "aligned64"
        await answer(send)

    async def main() -> None:
        await call(AllocatorMiddleware(app), http())
        assert current().name == "default_allocator"
        assert ctxalloc._serving.serving() is None

    asyncio.run(main())


# ---- Flask ------------------------------------------------------------------------------------------


def test_flask_streams_in_the_request_and_its_handler_answers_refusals() -> None:
    app = flask.Flask("test")
    reports: list[Report] = []

    @app.errorhandler(MemoryError)
    def refused(error: MemoryError) -> Any:
        problem = problems.problem(error)
        if problem is None:
            raise error
        return problem.body, problem.status, problem.headers

    @app.get("/stream")
    def stream() -> Any:
        def parts() -> Iterator[str]:
            for _ in range(2):
                np.empty(1000, np.uint8)
                yield current().name + " "

        return flask.Response(flask.stream_with_context(parts()))

    @app.get("/big")
    def too_much() -> str:
        big()
        return "never"

    @app.get("/broken")
    def broken() -> str:
        raise MemoryError("mine")

    app.wsgi_app = WsgiMiddleware(  # type: ignore[method-assign]
        app.wsgi_app, routes={"/stream": request()}, default=SMALL, on_end=lambda _, report: reports.append(report)
    )
    client = app.test_client()
    assert client.get("/stream", buffered=True).text == "/stream /stream "
    answered = client.get("/big", buffered=True)
    assert (answered.status_code, answered.mimetype) == (413, "application/problem+json")
    assert client.get("/broken", buffered=True).status_code == 500
    assert reports[0].stats.total_bytes == 2000
    assert [(report.outcome, report.status) for report in reports] == [
        ("completed", 200),
        ("refused", 413),
        ("failed", 500),
    ]
