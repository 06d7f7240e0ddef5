"""Which budget refused, and how an HTTP service says so: ``refusal`` and ``problem``.

Inside of a request NumPy raises a MemoryError that says nothing of budgets. The middlewares turn it into an answer by
themselves; these two are for handlers of errors in the application, where it makes the answer itself::

    @app.errorhandler(MemoryError)
    def refused(error):
        problem = ctxalloc.problems.problem(error)
        if problem is None:
            raise error
        return problem.body, problem.status, problem.headers

Neighbours: ``_serving`` has the request that is asked; ``src/answer.rs`` decides, for Rust's services too.
"""

import math
from http import HTTPStatus
from typing import Final, NamedTuple

from ctxalloc import _serving
from ctxalloc._errors import BudgetExceeded
from ctxalloc._native import _answer

__all__ = ["Problem", "problem", "refusal"]


MAX_RETRY_AFTER_SECONDS: Final = 120
"""The longest that a client is told to stay away, unless ``retry_after_seconds`` is longer."""


class Problem(NamedTuple):
    """An answer to a refusal: what a framework needs to send it. The body is a problem document (RFC 9457)."""

    status: int
    """413, 429 or 503."""
    headers: list[tuple[str, str]]
    """``content-type``, ``content-length`` and, with 429 and 503, ``retry-after``."""
    body: bytes
    """JSON, in UTF-8. It names no budget and no number: strangers read it."""


def refusal(error: BaseException) -> BudgetExceeded | None:
    """The refusal that led to a MemoryError in the request that is being served; None where another reason did.

    ``error`` itself, if it is a BudgetExceeded. It may be asked for the same exception more than once.
    """
    return _serving.refusal(error)


def problem(error: BaseException) -> Problem | None:
    """The answer to a MemoryError in the request that is being served; None where no budget refused.

    413 where a second try cannot succeed, 429 where the tenant's budget refused, 503 where another one did.
    """
    refused = _serving.refusal(error)
    if refused is None:
        return None
    serving = _serving.serving()
    return of(refused, serving)


def of(refused: BudgetExceeded, serving: "_serving.Served | None") -> Problem:
    """The answer to a refusal in a request; for the middlewares."""
    which = (refused.budget_id, refused.of_request, refused.limit_bytes)
    tenant = None if serving is None else serving.tenant
    held, asked = refused.held_bytes, refused.requested_bytes
    status, document, drain_seconds = _answer(which, held, asked, tenant, refused.never_fits)
    body = document.encode()
    headers = [("content-type", "application/problem+json"), ("content-length", str(len(body)))]
    if status != 413:
        seconds = 1 if serving is None else serving.service.retry_after_seconds
        if drain_seconds is not None:
            # As long as those will take who wait now, by how fast they got room lately.
            seconds = max(seconds, min(math.ceil(drain_seconds), MAX_RETRY_AFTER_SECONDS))
        headers.append(("retry-after", str(seconds)))
    return Problem(status, headers, body)


def phrase(status: int) -> str:
    """The reason phrase of a status; for the middlewares."""
    # The name of 413 since RFC 9110, which CPython has from 3.13 on.
    return "Content Too Large" if status == 413 else HTTPStatus(status).phrase
