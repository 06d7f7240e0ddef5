"""A request of a service whose task is cancelled because it was chosen to make room is answered as any refused one."""

import asyncio
from typing import Any, Literal

import numpy as np
import pytest
from asgi_calls import Client, answer, call, http

for library in ("django", "fastapi"):
    pytest.importorskip(library)

import django  # noqa: E402
import fastapi  # noqa: E402
from django.conf import settings  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.urls import path  # noqa: E402

from ctxalloc import Budget, BudgetExceeded, MiB, request, wsgi  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware, Report  # noqa: E402

if not settings.configured:
    settings.configure(ALLOWED_HOSTS=["*"], SECRET_KEY="-")
    django.setup()

from django.core.handlers.asgi import ASGIHandler  # noqa: E402

pytestmark = pytest.mark.any_numpy


async def holds() -> None:
    """Has 80 of the budget's 100 MiB, and asks for no more."""
    array = np.empty(80 * MiB, np.uint8)
    await asyncio.sleep(20)
    del array


async def bare(scope: Any, receive: Any, send: Any) -> None:
    await holds()
    await answer(send)


async def catching(scope: Any, receive: Any, send: Any) -> None:
    try:
        await holds()
    except BaseException:
        await asyncio.sleep(0)  # the cancellation came once
        raise


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await holds()


fast = fastapi.FastAPI()


@fast.get("/")
async def in_fastapi() -> None:
    await holds()


async def chosen(service: Any, budget: Budget) -> Client:
    """The answer to the one that holds, where another one waits for its room."""
    client = Client()

    async def receive() -> Any:
        if client.messages:
            return client.messages.pop(0)
        return await asyncio.Event().wait()

    victim = asyncio.create_task(service(http(), receive, client.send))
    while budget.in_use_bytes < 80 * MiB:  # noqa: ASYNC110 - nobody tells when it has allocated
        await asyncio.sleep(0.01)
    async with request(budget=budget, reserve_bytes=60 * MiB, timeout=10, root=True):
        pass
    await asyncio.wait_for(victim, 10)
    return client


def full() -> Budget:
    return Budget(100 * MiB, name="service", victims_after=0.05)


@pytest.mark.parametrize("ends", ["response", "application"])
@pytest.mark.parametrize("app", [bare, catching, fast], ids=["bare", "catching", "fastapi"])
def test_a_chosen_request_is_answered_with_503_and_reported_as_refused(
    app: Any, ends: Literal["response", "application"]
) -> None:
    reports: list[Report] = []
    budget = full()
    terms = request(budget=budget, cancel_if_chosen=True)
    service = AllocatorMiddleware(app, default=terms, ends=ends, on_end=lambda _, report: reports.append(report))
    client = asyncio.run(chosen(service, budget))
    assert (client.status, client.headers["retry-after"]) == (503, "1")
    (report,) = reports
    assert (report.outcome, report.status) == ("refused", 503)
    assert isinstance(report.error, BudgetExceeded)
    assert report.error.chosen_for is not None
    assert (budget.in_use_bytes, budget.reserved_bytes, budget.waiting) == (0, 0, 0)


def test_a_chosen_request_whose_answer_has_begun_raises_to_the_server() -> None:
    budget = full()
    service = AllocatorMiddleware(streaming, default=request(budget=budget, cancel_if_chosen=True))
    with pytest.raises(BudgetExceeded) as refused:
        asyncio.run(chosen(service, budget))
    assert refused.value.chosen_for is not None


def test_a_cancellation_by_somebody_else_stays_one() -> None:
    reports: list[Report] = []
    service = AllocatorMiddleware(
        bare, default=request(cancel_if_chosen=True), on_end=lambda _, report: reports.append(report)
    )

    async def main() -> None:
        task = asyncio.create_task(call(service, http()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [report.outcome for report in reports] == ["cancelled"]


def test_a_chosen_view_of_django_is_answered() -> None:
    budget = full()

    async def view(_: Any) -> HttpResponse:
        await holds()
        return HttpResponse()

    with override_settings(
        ROOT_URLCONF=(path("", view),),
        MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware"],
        CTXALLOC={"default": request(budget=budget, cancel_if_chosen=True)},
        LOGGING_CONFIG=None,
    ):
        client = asyncio.run(chosen(ASGIHandler(), budget))
    assert (client.status, client.headers["retry-after"]) == (503, "1")
    assert budget.waiting == 0


def test_under_wsgi_such_terms_are_refused_when_the_service_is_made() -> None:
    with pytest.raises(ValueError, match=r"'/large' have cancel_if_chosen=True.*a WSGI server has none"):
        wsgi.AllocatorMiddleware(lambda *_: [], routes={"/large": request(cancel_if_chosen=True)})
