"""When a request of Django ends: with its response, whose ``close`` lets go of the HttpRequest and what it has.

Django closes a response as the server is done with it: it calls the response's closers, forgets them, and sends
``request_finished`` from the same thread. An account that ended before would count ``request.form_data`` as an escape.
Imported by ``django`` only. Neighbour: ``_serving``.
"""

import asyncio
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from django.core.signals import request_finished
from django.http.response import HttpResponseBase

from ctxalloc._outcome import Outcome
from ctxalloc._serving import Serving

_HERE = threading.local()
"""``closing``: the Closing whose response this thread is closing."""


class Closing:
    """A closer of a response, which ends the account when the response is closed; or when nobody closes it."""

    def __init__(self, serving: Serving, response: HttpResponseBase, *, is_whole: bool) -> None:
        self._serving: Serving | None = serving
        self._response: weakref.ref[HttpResponseBase] | None = weakref.ref(response)  # which refers to this
        self.is_whole = is_whole
        """All of the answer was made, or sent."""
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._context = None if self._loop is None else contextvars.copy_context()
        closers_of(response).append(self)

    def __call__(self) -> None:
        """Once as one of the closers, and once more as the last of them: those behind this one hold the HttpRequest."""
        response = None if self._response is None else self._response()
        self._response = None
        if response is None:
            _HERE.closing = self
        else:
            closers_of(response).append(self)

    def end(self) -> None:
        """Ends the account: on the request's loop, where it has one, for there is looked later what has escaped."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        outcome: Outcome = "completed" if self.is_whole else "unfinished"
        finish = functools.partial(_finish, serving, outcome)  # without this, which may be garbage
        if self._loop is None:
            finish()
            return
        try:
            self._loop.call_soon_threadsafe(finish, context=self._context)
        except RuntimeError:  # it is closed
            finish()
        self._context = None

    def __del__(self) -> None:
        """Nobody has closed the response."""
        self.end()

    def __reduce__(self) -> tuple[Any, ...]:
        """A cached response is another one."""
        return str, ()


def _finish(serving: Serving, outcome: Outcome) -> None:
    serving.end(outcome)
    serving.forget()


def closers_of(response: HttpResponseBase) -> list[Callable[[], None]]:
    """What Django calls when it closes the response."""
    closers: list[Callable[[], None]] = response._resource_closers  # noqa: SLF001 - there is no other way
    return closers


def _finished(**_: object) -> None:
    closing: Closing | None = getattr(_HERE, "closing", None)
    if closing is not None:
        _HERE.closing = None
        closing.end()


request_finished.connect(_finished, dispatch_uid="ctxalloc.django")
