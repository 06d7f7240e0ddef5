"""`ctxalloc.asgi.RequestMiddleware`: a request of ours for each one of an ASGI application. No server here."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import pytest

import ctxalloc
from ctxalloc import Budget, BudgetExceeded, Request, current, request
from ctxalloc.asgi import RequestMiddleware

Scope = MutableMapping[str, Any]


async def receive() -> MutableMapping[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def send(_message: MutableMapping[str, Any]) -> None:
    raise AssertionError("nothing is sent here")


def test_each_request_has_memory_and_numbers_of_its_own() -> None:
    seen: list[Request] = []

    async def application(scope: Scope, _receive: Any, _send: Any) -> None:
        begun = scope["ctxalloc.request"]
        array = np.empty(scope["size"], np.uint8)
        await asyncio.sleep(0)
        assert ctxalloc.handler_of(array) == begun.handler == current()
        assert begun.stats.live_bytes == scope["size"]
        seen.append(begun)

    async def main() -> None:
        service = RequestMiddleware(application)
        scopes = [{"type": kind, "size": size} for size in range(10, 20) for kind in ("http", "websocket")]
        await asyncio.gather(*(service(scope, receive, send) for scope in scopes))
        assert all("ctxalloc.request" not in scope for scope in scopes)

    asyncio.run(main())
    assert len(seen) == 20
    assert all(scope.escaped is not None and scope.escaped.count == 0 for scope in seen)


def test_terms_may_depend_on_the_scope_a_refusal_is_budget_exceeded() -> None:
    tenants = {"small": Budget(1000, name="small"), "large": Budget(1 << 20, name="large")}
    seen: list[str] = []

    async def application(scope: Scope, _receive: Any, _send: Any) -> None:
        np.empty(5000, np.uint8)
        seen.append(scope["path"])

    def terms(scope: Scope) -> Request | None:
        tenant = tenants.get(scope["path"])
        return None if tenant is None else request(budget=tenant)

    service = RequestMiddleware(application, request=terms)
    for path in ("large", "nobody"):
        asyncio.run(service({"type": "http", "path": path}, receive, send))
    with pytest.raises(BudgetExceeded, match="'small' has no room for 5000 more bytes"):
        asyncio.run(service({"type": "http", "path": "small"}, receive, send))
    assert seen == ["large", "nobody"]
    assert tenants["large"].peak_bytes == 5000


def test_lifespan_passes_through() -> None:
    async def application(scope: Scope, _receive: Any, _send: Any) -> None:
        assert "ctxalloc.request" not in scope
        assert current().name == "default_allocator"

    before = ctxalloc.request_metrics().begun
    asyncio.run(RequestMiddleware(application)({"type": "lifespan"}, receive, send))
    assert ctxalloc.request_metrics().begun == before
