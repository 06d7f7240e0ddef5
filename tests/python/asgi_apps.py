"""Applications of ASGI for tests that call them (`asgi_calls`), and an ``on_end`` that keeps the reports."""

import asyncio
from typing import Any

import numpy as np
from asgi_calls import Scope, answer

import ctxalloc_example as example
from ctxalloc import MiB, current, handler_of
from ctxalloc.asgi import Report

BIG = 10 * MiB


class Reports:
    """An ``on_end`` that keeps the reports."""

    def __init__(self) -> None:
        self.all: list[Report] = []
        self.paths: list[str] = []

    def __call__(self, scope: Scope, report: Report) -> None:
        self.paths.append(scope["path"])
        self.all.append(report)

    @property
    def only(self) -> Report:
        (report,) = self.all
        return report


def makes(size: int = BIG) -> Any:
    """An application that needs so much memory."""

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        np.empty(size, np.uint8)
        await answer(send)

    return app


async def tells(scope: Scope, receive: Any, send: Any) -> None:
    """Says under which handler its work was done, wherever it was done."""
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
    await answer(send, ",".join(sorted(seen)).encode())


async def named() -> str:
    await asyncio.sleep(0)
    return current().name
