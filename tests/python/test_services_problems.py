"""Which answer a refusal gets: by which account refused and whether a second try can succeed, never by names."""

import asyncio
import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
from asgi_calls import Client, answer, call, http

import ctxalloc
from ctxalloc import Budget, BudgetExceeded, MiB, problems, request
from ctxalloc.asgi import AllocatorMiddleware

pytestmark = pytest.mark.any_numpy

UNLIMITED = 2**64 - 1

# Whose budget, whether it is a request's limit, its limit, what the request holds, what it asked for, the status. The
# same table as in src/answer.rs.
TABLE = [
    ("other", True, 100, 90, 20, 413),
    ("other", True, 100, 0, 20, 413),
    ("tenant", False, 100, 0, 20, 429),
    ("tenant", False, 100, 80, 20, 429),
    ("tenant", False, 100, 81, 20, 413),
    ("tenant", False, 100, 0, 101, 413),
    ("tenant", True, 100, 0, 20, 429),
    ("other", False, 100, 0, 20, 503),
    ("other", False, 100, 81, 20, 413),
    ("other", False, 0, 0, 1, 413),
    ("other", False, UNLIMITED, 5, UNLIMITED, 413),
]


def asked(app: Any, path: str = "/", **options: Any) -> Client:
    return asyncio.run(call(AllocatorMiddleware(app, **options), http(path)))


def makes(*sizes: int) -> Any:
    """An application that holds so many arrays at one time."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        held = [np.empty(size, np.uint8) for size in sizes]
        await answer(send, str(len(held)).encode())

    return app


@pytest.mark.parametrize("row", TABLE)
def test_the_answer_says_whether_a_second_try_may_succeed(
    row: tuple[str, bool, int, int, int, int],
) -> None:
    whose, of_request, limit, held, wanted, status = row
    tenant, other = Budget(name="same"), Budget(name="same")
    which = {"tenant": tenant, "other": other}[whose]
    error = BudgetExceeded("same", limit, limit, wanted, held, which.id, of_request)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        problem = problems.problem(error)
        assert problem is not None
        await answer(send, problem.body, problem.status)

    client = asked(app, tenant=lambda _: tenant)
    assert client.status == json.loads(client.body)["status"] == status
    if error.never_fits:
        assert status == 413


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


def test_what_never_fits_beside_the_guarantees_of_others_is_413() -> None:
    service = Budget(64 * MiB, name="service")
    promised = Budget(parent=service, guarantee_bytes=40 * MiB)
    options = {"default": request(budget=service)}
    assert asked(makes(10 * MiB, 15 * MiB), **options).status == 413
    assert asked(makes(10 * MiB, 10 * MiB), **options).status == 200
    with request(budget=service):
        others = np.empty(10 * MiB, np.uint8)
    client = asked(makes(10 * MiB, 10 * MiB), **options)
    assert (client.status, "retry-after" in client.headers) == (503, True)
    expected = pytest.raises(BudgetExceeded, match=r"of which 41943040 are guaranteed to others; free")
    with expected as raised, request(budget=service):
        np.empty(30 * MiB, np.uint8)
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert (error.guaranteed_bytes, error.never_fits) == (40 * MiB, True)
        assert "guaranteed to others" in str(error)
    del others, promised, raised, error
    assert asked(makes(10 * MiB, 15 * MiB), **options).status == 200


def test_a_request_inside_or_around_that_is_too_small_is_413() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        with request(limit_bytes=MiB, name="part"):
            held = [np.empty(MiB // 2, np.uint8) for _ in range(3)]
        await answer(send, str(len(held)).encode())

    assert asked(app).status == 413
    around = AllocatorMiddleware(AllocatorMiddleware(makes(MiB, MiB)), default=request(limit_bytes=MiB * 3 // 2))
    assert asyncio.run(call(around, http())).status == 413


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
