"""A request of a server that waits for its reservation before the application is called: ``asgi`` and ``django``.

Where it gets none it is begun all the same, without a reservation: then it has an end, an answer and an ``on_end`` like
any other. Threads (``wsgi``) need nothing of this: they wait in ``Request._begin``. Neighbours: ``_room`` waits;
``_serving`` decides who has to.
"""

import asyncio
import contextvars
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any, Final, Generic, TypeVar

from ctxalloc import _room
from ctxalloc._errors import NoRoom
from ctxalloc._native import Budget, Request

_S = TypeVar("_S")


class Gone(Exception):  # noqa: N818 - no error: it is not raised outside of the package
    """The client has gone while its request waited."""


class Waiting(Generic[_S]):
    """A request that is to begin when there is room. ``make`` makes the record of one that has begun."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        terms: Request,
        is_root: bool,  # noqa: FBT001 - as above
        name: str | None,
        tenant: Budget | None,
        sites: bool,  # noqa: FBT001 - as above
        make: Callable[[Request], _S],
        *,
        selects: bool,
    ) -> None:
        self._terms = terms
        self._is_root = is_root
        self._name = name
        self._tenant = tenant
        self._sites = sites
        self._make = make
        self._selects = selects

    async def begin(self, client: "Client | None" = None) -> tuple[_S, NoRoom | Gone | None]:
        """Begin it; and why it has no reservation, if it has none. Cancelled, it has ended, and leaves no trace."""
        begun = self._again(self._terms)
        try:
            await _room.enter(begun, selects=self._selects, listener=client)
        except (NoRoom, Gone) as error:
            return self._unreserved(), error.with_traceback(None)
        except BaseException as error:
            if not isinstance(error, Exception):
                # Here, and not by the caller: a coroutine that is closed returns nothing.
                served: Any = self._unreserved()
                if self._selects:
                    served.leave()
                served.end_unanswered(error)
                served.forget()
                del served
            raise
        return self._make(begun), None

    def _unreserved(self) -> _S:
        """The record of one that got no reservation, begun all the same."""
        terms = self._terms._unreserved()  # noqa: SLF001 - made for this
        if self._selects:
            return self._make(terms._serve(self._is_root, self._name, self._tenant))  # noqa: SLF001
        begun = self._again(terms)
        begun._begin()  # noqa: SLF001
        return self._make(begun)

    def _again(self, terms: Request) -> Request:
        return terms._again(root=self._is_root, name=self._name, budget=self._tenant, sites=self._sites)  # noqa: SLF001


class Client:
    """The client's side of an ASGI call, listened to while its request waits. Nothing that it says is lost.

    It is listened to until its body is whole, and then until it goes away. Of a body that goes on at most ``MAX_KEPT``
    bytes are kept, and the part that passes them: one who waits has no memory. So one that goes away in the midst of a
    longer body is noticed later, by the application.
    """

    MAX_KEPT: Final = 64 * 1024
    """What has been heard, in bytes; each message counts as one KiB at least."""

    def __init__(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
        self._receive = receive
        self._heard: deque[MutableMapping[str, Any]] = deque()
        self._kept = 0
        self._next: _Hearing | asyncio.Future[MutableMapping[str, Any]] | None = None
        self._is_whole = False
        self._listens = True

    async def until(self, turn: "asyncio.Future[None]") -> None:
        """Wait for the turn. Gone: the client has gone before."""
        while not turn.done():
            if self._next is None and self._listens:
                self._next = asyncio.ensure_future(self._receive())
            if self._next is None or not self._listens:
                await turn
                return
            said = self._next
            assert not isinstance(said, _Hearing)  # noqa: S101 - of trio's
            await asyncio.wait((turn, said), return_when=asyncio.FIRST_COMPLETED)
            if said.done():
                self._hear(said)

    async def until_cancelled(self) -> None:
        """The same under trio. What is being received goes on."""
        while self._listens:
            said = self._next = _Hearing(self._receive)
            await said.ended()
            self._hear(said)
        await sys.modules["trio"].sleep_forever()

    def _hear(self, said: "_Hearing | asyncio.Future[MutableMapping[str, Any]]") -> None:
        if said.cancelled() or said.exception() is not None:
            self._listens = False  # the application gets it
            return
        self._next = None
        message = said.result()
        self._heard.append(message)
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            raise Gone
        self._kept += max(len(message.get("body") or b""), 1024)
        was_whole, self._is_whole = self._is_whole, not message.get("more_body", False)
        # What follows a whole body is its client's leaving; a server that says otherwise is not listened to for ever.
        self._listens = self._kept < self.MAX_KEPT or (self._is_whole and not was_whole)

    async def receive(self) -> MutableMapping[str, Any]:
        """The application's ``receive``: first what was heard."""
        if self._heard:
            return self._heard.popleft()
        following, self._next = self._next, None
        return await (self._receive() if following is None else following)

    def close(self) -> None:
        """Nobody listens any more."""
        if self._next is not None:
            self._next.cancel()


class _Hearing:
    """A ``receive`` under trio, as a future of asyncio would be: in a task of its own, so that nobody's end ends it.

    A middleware's ``receive`` may have taken a message from the server, and be cancelled before it returns it.
    """

    def __init__(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
        trio: Any = sys.modules["trio"]
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        self._message: MutableMapping[str, Any] | None = None
        self._error: Exception | None = None
        trio.lowlevel.spawn_system_task(self._hear, receive, context=contextvars.copy_context())

    async def _hear(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
        try:
            with self._scope:
                self._message = await receive()
        except Exception as error:  # noqa: BLE001 - the application gets it
            self._error = error
        finally:
            self._ended.set()

    async def ended(self) -> None:
        """Returns when it has."""
        await self._ended.wait()

    def cancelled(self) -> bool:
        return self._message is None and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> MutableMapping[str, Any]:
        if self._error is not None:
            raise self._error
        assert self._message is not None, "only its client cancels it"  # noqa: S101 - as said
        return self._message

    def cancel(self) -> None:
        self._scope.cancel()

    def __await__(self) -> Generator[Any, Any, MutableMapping[str, Any]]:
        try:
            yield from self.ended().__await__()
        except BaseException:
            self.cancel()
            raise
        return self.result()
