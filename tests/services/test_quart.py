"""Quart answers exceptions itself, and sends its 500 when it handles none any more: it tells of them by a signal."""

import asyncio
from typing import Any

import numpy as np
import pytest

quart = pytest.importorskip("quart")

from asgi_calls import Client, http  # noqa: E402

import ctxalloc  # noqa: E402
from ctxalloc import MiB, problems, request  # noqa: E402
from ctxalloc.asgi import AllocatorMiddleware  # noqa: E402


def application() -> Any:
    app = quart.Quart("served")
    app.logger.disabled = True

    @app.get("/refused")
    async def refused() -> str:
        held = np.ones(1000)
        return str(held[0] + np.ones(2 * MiB)[0])

    @app.get("/thread")
    def in_a_thread() -> str:
        return str(np.ones(2 * MiB)[0])

    @app.get("/failed")
    async def failed() -> str:
        try:
            np.ones(2 * MiB)
        except MemoryError:
            raise ValueError("for another reason") from None
        return ""

    @app.get("/fine")
    async def fine() -> str:
        return "fine"

    return app


def ask(app: Any, path: str, **options: Any) -> tuple[int, str, int | None, int]:
    """The status that the client got, and what was reported: outcome, status, arrays that have escaped."""
    reports: list[Any] = []
    service = AllocatorMiddleware(
        app, default=request(limit_bytes=MiB), on_end=lambda _, report: reports.append(report), **options
    )

    class Staying(Client):
        async def receive(self) -> Any:
            if not self.messages:
                await asyncio.Event().wait()
            return await super().receive()

    async def one() -> int:
        client = Staying()
        await service({**http(path), "http_version": "1.1", "scheme": "http"}, client.receive, client.send)
        await asyncio.sleep(0)
        return client.status

    status = asyncio.run(one())
    (report,) = reports
    if report.outcome == "refused":
        assert isinstance(report.error, ctxalloc.BudgetExceeded)
    return status, report.outcome, report.status, report.escaped.count


@pytest.mark.parametrize("path", ["/refused", "/thread"])
def test_a_refusal_in_quart_is_answered(path: str) -> None:
    assert ask(application(), path) == (413, "refused", 413, 0)
    assert ask(application(), path, answers=False) == (500, "refused", 500, 0)


@pytest.mark.parametrize(("path", "status", "outcome"), [("/failed", 500, "failed"), ("/fine", 200, "completed")])
def test_another_answer_of_quarts_passes(path: str, status: int, outcome: str) -> None:
    assert ask(application(), path) == (status, outcome, status, 0)


def test_a_handler_of_quarts_application_answers() -> None:
    app = application()

    @app.errorhandler(MemoryError)
    async def refused(error: MemoryError) -> Any:
        assert problems.refusal(error) is not None
        return "come back later", 503

    assert ask(app, "/refused") == (503, "refused", 503, 0)


@pytest.mark.parametrize(("own", "answered"), [(500, 413), (507, 507)])
def test_a_500_of_quarts_handler_is_replaced_and_another_status_sent(own: int, answered: int) -> None:
    app = application()

    @app.errorhandler(500)
    async def failed(error: Exception) -> Any:
        return "own", own

    assert ask(app, "/refused") == (answered, "refused", answered, 0)
