"""`ctxalloc.asgi.HandlerMiddleware`: a handler for each request, seen by all that the request does. No server here."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import numpy as np
import pytest
from built_in import HANDLERS

import ctxalloc
import ctxalloc_example as example
from ctxalloc import current, handler_of
from ctxalloc.asgi import HandlerMiddleware

Scope = MutableMapping[str, Any]


async def receive() -> MutableMapping[str, Any]:
    return {"type": "http.request", "body": b"asked", "more_body": False}


async def call(app: Callable[..., Awaitable[None]], scope: Scope) -> list[MutableMapping[str, Any]]:
    """One request; what was sent."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def tells(scope: Scope, receive: Any, send: Any) -> None:
    """An application that says under which handler its work was done, wherever it was done."""
    message = await receive()
    seen = {
        current().name,
        await asyncio.create_task(named()),
        await asyncio.to_thread(example.handler_here),
        await example.await_python(named),
        *(name for name, _ in await example.handlers_on_the_way(1)),
    }
    owner = handler_of(np.ones(10))
    assert owner is not None
    seen.add(owner.name)
    await send({"type": "told", "handlers": seen, "body": message["body"]})


async def named() -> str:
    await asyncio.sleep(0)
    return current().name


def by_path(scope: Scope) -> str | None:
    return scope["path"].lstrip("/") or None


def test_a_request_runs_under_the_handler_that_was_selected_for_it() -> None:
    app = HandlerMiddleware(tells, select=by_path)
    for kind in ("http", "websocket"):
        for name in HANDLERS:
            sent = asyncio.run(call(app, {"type": kind, "path": f"/{name}"}))
            assert sent == [{"type": "told", "handlers": {name}, "body": b"asked"}]
    assert current().name == "default_allocator"


def test_none_leaves_the_selection_as_it_is() -> None:
    app = HandlerMiddleware(tells, select=by_path)

    async def main() -> None:
        assert (await call(app, {"type": "http", "path": "/"}))[0]["handlers"] == {"default_allocator"}
        async with ctxalloc.use("aligned64"):
            assert (await call(app, {"type": "http", "path": "/"}))[0]["handlers"] == {"aligned64"}
            assert (await call(app, {"type": "http", "path": "/system"}))[0]["handlers"] == {"system"}
            assert current().name == "aligned64"

    asyncio.run(main())


def test_a_handler_object_may_be_selected() -> None:
    app = HandlerMiddleware(tells, select=lambda _: ctxalloc.handler("aligned64"))
    assert asyncio.run(call(app, {"type": "http"}))[0]["handlers"] == {"aligned64"}


@pytest.mark.parametrize("kind", ["lifespan", "something.new"])
def test_other_scopes_pass_through_unasked(kind: str) -> None:
    def never(scope: Scope) -> str:
        raise AssertionError(scope)

    app = HandlerMiddleware(tells, select=never)
    assert asyncio.run(call(app, {"type": kind}))[0]["handlers"] == {"default_allocator"}


def test_scope_receive_and_send_reach_the_application_unchanged() -> None:
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.extend(arguments)

    async def send(message: Any) -> None: ...

    scope: Scope = {"type": "http", "path": "/aligned64"}
    asyncio.run(HandlerMiddleware(app, select=by_path)(scope, receive, send))
    assert [id(thing) for thing in seen] == [id(scope), id(receive), id(send)]


def test_concurrent_requests_do_not_see_each_other() -> None:
    async def slow(scope: Scope, receive: Any, send: Any) -> None:
        own = scope["path"].lstrip("/")
        for _ in range(5):
            await scope["gate"].wait()
            assert current().name == own
            owner = handler_of(np.ones(100) * 2)
            assert owner is not None
            assert owner.name == own
        await send({"handler": own})

    app = HandlerMiddleware(slow, select=by_path)

    async def main() -> None:
        gate = asyncio.Barrier(10 * len(HANDLERS))
        scopes = [{"type": "http", "path": f"/{name}", "gate": gate} for name in HANDLERS * 10]
        answers = await asyncio.gather(*(call(app, scope) for scope in scopes))
        assert [sent[0]["handler"] for sent in answers] == list(HANDLERS) * 10

    asyncio.run(main())


def test_an_error_of_the_application_passes_through_and_restores() -> None:
    async def fails(scope: Scope, receive: Any, send: Any) -> None:
        raise KeyError(current().name)

    app = HandlerMiddleware(fails, select=by_path)

    async def main() -> None:
        with pytest.raises(KeyError, match="aligned64"):
            await call(app, {"type": "http", "path": "/aligned64"})
        assert current().name == "default_allocator"

    asyncio.run(main())


def test_a_cancelled_request_restores() -> None:
    async def main() -> None:
        started, seen = asyncio.Event(), []

        async def hangs(scope: Scope, receive: Any, send: Any) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                seen.append(current().name)

        async def request() -> None:
            try:
                await call(HandlerMiddleware(hangs, select=by_path), {"type": "http", "path": "/aligned64"})
            finally:
                seen.append(current().name)

        task = asyncio.create_task(request())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["aligned64", "default_allocator"]

    asyncio.run(main())


def test_an_unknown_name_fails_the_request_with_the_names_there_are() -> None:
    async def never(scope: Scope, receive: Any, send: Any) -> None:
        raise AssertionError(scope)

    app = HandlerMiddleware(never, select=by_path)
    with pytest.raises(ctxalloc.UnknownHandlerError, match="no handler is named 'fast'; registered are: system"):
        asyncio.run(call(app, {"type": "http", "path": "/fast"}))


def test_middlewares_nest_and_the_inner_one_wins() -> None:
    inner = HandlerMiddleware(tells, select=by_path)
    app = HandlerMiddleware(inner, select=lambda _: "aligned64")
    assert asyncio.run(call(app, {"type": "http", "path": "/system"}))[0]["handlers"] == {"system"}
    assert asyncio.run(call(app, {"type": "http", "path": "/"}))[0]["handlers"] == {"aligned64"}


def test_select_is_a_keyword() -> None:
    with pytest.raises(TypeError):
        HandlerMiddleware(tells, by_path)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        HandlerMiddleware(tells)  # type: ignore[call-arg]
