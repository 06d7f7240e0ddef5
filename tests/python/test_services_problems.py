"""Which answer a refusal gets: by which account refused and whether a second try can succeed, never by names."""

import asyncio
import copy
import pickle
from typing import Any

import numpy as np
import pytest
from asgi_calls import Client, answer, call, http

import ctxalloc
from ctxalloc import Budget, BudgetExceeded, MiB, request
from ctxalloc.asgi import AllocatorMiddleware

pytestmark = pytest.mark.any_numpy


def asked(app: Any, path: str = "/", **options: Any) -> Client:
    return asyncio.run(call(AllocatorMiddleware(app, **options), http(path)))


def makes(*sizes: int) -> Any:
    """An application that holds so many arrays at one time."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        held = [np.empty(size, np.uint8) for size in sizes]
        await answer(send, str(len(held)).encode())

    return app


def test_budgets_of_one_name_are_told_apart() -> None:
    service = Budget(64 * MiB, name="same")
    tenant = Budget(16 * MiB, parent=service, name="same")
    options: dict[str, Any] = {"routes": {"/same": request(name="same")}, "tenant": lambda _: tenant}
    with request(budget=service):
        others = np.empty(60 * MiB, np.uint8)
    assert asked(makes(10 * MiB), "/same", **options).status == 503
    del others
    with request(budget=tenant):
        theirs = np.empty(10 * MiB, np.uint8)
    assert asked(makes(10 * MiB), "/same", **options).status == 429
    del theirs
    limited = request(name="same", limit_bytes=12 * MiB)
    assert asked(makes(8 * MiB, 8 * MiB), **{**options, "default": limited}).status == 413
    assert asked(makes(10 * MiB), "/same", **options).status == 200


def test_what_one_request_alone_uses_up_is_413_in_a_shared_budget_too() -> None:
    service = Budget(64 * MiB, name="service")
    tenant = Budget(16 * MiB, parent=service, name="tenant")
    assert asked(makes(10 * MiB, 10 * MiB), tenant=lambda _: tenant).status == 413
    assert asked(makes(40 * MiB, 40 * MiB), default=request(budget=service)).status == 413


def test_a_request_inside_or_around_that_is_too_small_is_413() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        with request(limit_bytes=MiB, name="part"):
            held = [np.empty(MiB // 2, np.uint8) for _ in range(3)]
        await answer(send, str(len(held)).encode())

    assert asked(app).status == 413
    around = AllocatorMiddleware(AllocatorMiddleware(makes(MiB, MiB)), default=request(limit_bytes=MiB * 3 // 2))
    assert asyncio.run(call(around, http())).status == 413


def test_what_a_look_for_a_refusal_takes_is_not_the_requests() -> None:
    """It may have no room left."""
    selected: list[str] = []

    class Odd(Exception):  # noqa: N818 - no error of the library's
        @property
        def __cause__(self) -> None:  # type: ignore[override]
            selected.append(ctxalloc.current().name)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert ctxalloc.problems.refusal(Odd()) is None
        selected.append(ctxalloc.current().name)
        await answer(send)

    with ctxalloc.use("aligned64"):
        asked(app, default=request(name="served"))
    assert selected == ["aligned64", "served"]


def test_an_inner_middleware_knows_the_tenant_of_the_one_around_it() -> None:
    tenant = Budget(16 * MiB, name="tenant")
    around = AllocatorMiddleware(AllocatorMiddleware(makes(10 * MiB)), tenant=lambda _: tenant)
    with request(budget=tenant):
        theirs = np.empty(10 * MiB, np.uint8)
    assert asyncio.run(call(around, http())).status == 429
    del theirs
    assert asyncio.run(call(around, http())).status == 200


def test_the_exception_names_the_account_that_refused() -> None:
    tenant = Budget(16 * MiB, name="tenant")
    with pytest.raises(BudgetExceeded) as raised, request(budget=tenant):  # noqa: PT012 - it takes two
        held = np.empty(10 * MiB, np.uint8)
        np.empty(10 * MiB, np.uint8)
    error = raised.value
    assert (error.budget_id, error.of_request, error.held_bytes, error.never_fits) == (
        tenant.id,
        False,
        held.size,
        True,
    )
    assert tenant.id in [budget.id for budget in ctxalloc.metrics.budgets()]
    with pytest.raises(BudgetExceeded) as raised, request(limit_bytes=MiB) as scope:
        np.empty(10 * MiB, np.uint8)
    assert (raised.value.budget_id, raised.value.of_request) == (scope.budget.id, True)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (other.held_bytes, other.of_request, other.never_fits) == (held.size, False, True)
    assert pickle.loads(pickle.dumps(error)).budget_id is None, "a number of this process"
