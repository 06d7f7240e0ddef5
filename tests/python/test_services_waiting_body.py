"""What a client says while its request waits for room is kept for the application, up to a bound; or it has gone."""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
from asgi_calls import Message, answer, http, websocket
from rooms import is_as_new, until_soon

import ctxalloc
from ctxalloc import Budget, KiB, request
from ctxalloc._waiting import Client as Listened
from ctxalloc.asgi import AllocatorMiddleware

pytestmark = pytest.mark.any_numpy

GONE: Message = {"type": "http.disconnect"}


def body(*parts: bytes, ends: bool = True) -> list[Message]:
    """The messages of a body, of which the last one says whether it ends."""
    last = len(parts) - 1
    return [{"type": "http.request", "body": part, "more_body": at < last or not ends} for at, part in enumerate(parts)]


def brief(messages: Iterable[Message]) -> list[tuple[Any, ...]]:
    """What can be compared, and shown where it differs."""
    return [
        (one["type"], len(one["body"]), one["body"][:1], one["more_body"]) if "body" in one else (one["type"],)
        for one in messages
    ]


class Peer:
    """A client behind a server: what it says, one message after the other; then nothing, until it says more."""

    def __init__(self, *said: Message) -> None:
        self.said = deque(said)
        self.taken = 0
        self.more = asyncio.Event()

    async def receive(self) -> Message:
        while not self.said:
            self.more.clear()
            await self.more.wait()
        self.taken += 1
        return self.said.popleft()

    def say(self, *messages: Message) -> None:
        self.said.extend(messages)
        self.more.set()

    async def send(self, message: Message) -> None: ...


class Service:
    """An application that hears all of a body, and whose requests wait for room."""

    def __init__(self) -> None:
        self.budget = Budget(1000, name="b")
        self.heard: list[Message] = []
        self.outcomes: list[str] = []
        terms = request(budget=self.budget, reserve_bytes=600)
        self.app = AllocatorMiddleware(self._hear, default=terms, on_end=self._note)

    async def _hear(self, scope: Any, receive: Any, send: Any) -> None:
        while not self.heard or self.heard[-1].get("more_body"):
            self.heard.append(await receive())
        if self.heard[-1] != GONE:
            await answer(send)

    def _note(self, scope: Any, report: Any) -> None:
        self.outcomes.append(report.outcome)

    def full(self) -> ctxalloc.Request:
        return request(budget=self.budget, reserve_bytes=600, root=True)

    async def waits(self, peer: Peer, scope: Any = None) -> "asyncio.Task[None]":
        """One that waits, when it has heard what it wants to."""
        task = asyncio.create_task(self.app(http() if scope is None else scope, peer.receive, peer.send))
        await until_soon(lambda: self.budget.waiting == 1)
        await still(peer)
        return task


async def still(peer: Peer) -> None:
    """Nothing of what was said is taken any more."""
    for taken in iter(lambda: peer.taken, None):
        for _ in range(10):
            await asyncio.sleep(0)
        if peer.taken == taken:
            return


SMALL = {
    "one message": body(b"abc"),
    "an empty last message": body(b"abc", b""),
    "nothing": body(b"", b"", b""),
    "several parts": body(b"ab", b"c", b"defg", b""),
    "many parts": body(*[b"x"] * 60),
    "just below the bound": body(bytes(64 * KiB - 1), b""),
    "one message above the bound": body(bytes(200 * KiB)),
}


@pytest.mark.parametrize("said", SMALL.values(), ids=SMALL)
def test_a_client_whose_body_has_come_leaves_the_line_when_it_goes(said: list[Message]) -> None:
    async def main() -> None:
        service, peer = Service(), Peer(*said)
        async with service.full():
            task = await service.waits(peer)
            assert not peer.said
            peer.say(GONE)
            await asyncio.wait_for(task, 20)
            assert (service.budget.waiting, service.heard, service.outcomes) == (0, [], ["disconnected"])
        assert is_as_new(service.budget)

    asyncio.run(main())


@pytest.mark.parametrize("said", SMALL.values(), ids=SMALL)
def test_a_body_that_has_come_meanwhile_reaches_the_application(said: list[Message]) -> None:
    async def main() -> None:
        service, peer = Service(), Peer(*said)
        async with service.full():
            task = await service.waits(peer)
            assert not peer.said
        await asyncio.wait_for(task, 20)
        assert (brief(service.heard), service.outcomes) == (brief(said), ["completed"])
        assert is_as_new(service.budget)

    asyncio.run(main())


LARGE = {
    "large parts": (body(*[bytes(64 * KiB)] * 4), 1),
    "one large part": (body(bytes(200 * KiB), b"x"), 1),
    "parts of some size": (body(*[bytes(10 * KiB)] * 20), 7),
    "a large part after a small one": (body(b"x", bytes(100 * KiB), b"x"), 2),
    "the bound": (body(bytes(64 * KiB), b""), 1),
    "a thousand small parts": (body(*[b"x"] * 1000), 64),
    "a thousand of nothing": (body(*[b""] * 1000), 64),
}


@pytest.mark.parametrize(("said", "taken"), LARGE.values(), ids=LARGE)
def test_of_a_long_body_no_more_is_kept_than_the_bound(said: list[Message], taken: int) -> None:
    async def main(*, leaves: bool) -> None:
        service, peer = Service(), Peer(*said[:-1])
        async with service.full():
            task = await service.waits(peer)
            assert peer.taken == taken
            peer.say(GONE if leaves else said[-1])
            await still(peer)
            assert (peer.taken, service.budget.waiting) == (taken, 1), "the rest is left to the server"
        await asyncio.wait_for(task, 20)
        assert brief(service.heard) == brief([*said[:-1], GONE if leaves else said[-1]])
        assert service.outcomes == ["disconnected" if leaves else "completed"]
        assert is_as_new(service.budget)

    asyncio.run(main(leaves=False))
    asyncio.run(main(leaves=True))


def test_one_that_sends_its_body_slowly_is_listened_to_until_the_end() -> None:
    async def main() -> None:
        service, peer = Service(), Peer()
        async with service.full():
            task = await service.waits(peer)
            for part in (b"a", b"", b"b"):
                peer.say(*body(part, ends=False))
                await still(peer)
                assert not peer.said
            peer.say(GONE)
            await asyncio.wait_for(task, 20)
        assert service.outcomes == ["disconnected"], "in the midst of its body"
        assert is_as_new(service.budget)

    asyncio.run(main())


@pytest.mark.parametrize("message", [body(b"")[0], {"type": "http.request"}, {"type": "websocket.receive", "text": ""}])
def test_a_server_that_says_the_same_for_ever_is_not_kept(message: Message) -> None:
    async def main() -> None:
        service, peer = Service(), Peer()
        scope = websocket() if message["type"].startswith("websocket") else http()

        async def receive() -> Message:
            peer.taken += 1
            return message

        async with service.full():
            task = asyncio.create_task(service.app(scope, receive, peer.send))
            await until_soon(lambda: service.budget.waiting == 1)
            await asyncio.wait_for(still(peer), 20)
            assert peer.taken <= 65
        await asyncio.wait_for(task, 20)
        assert service.heard == [message]

    asyncio.run(main())


def test_what_receive_raises_meanwhile_reaches_the_application() -> None:
    async def main() -> None:
        service, said = Service(), body(b"a", b"b")

        async def receive() -> Message:
            if not said:
                raise KeyError("from the server")
            return {**said.pop(0), "more_body": True}

        async with service.full():
            task = asyncio.create_task(service.app(http(), receive, Peer().send))
            await until_soon(lambda: service.budget.waiting == 1)
            await until_soon(lambda: not said)
        with pytest.raises(KeyError, match="from the server"):
            await asyncio.wait_for(task, 20)
        assert [message["body"] for message in service.heard] == [b"a", b"b"]
        assert service.outcomes == ["failed"]
        assert is_as_new(service.budget)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_any_body_is_heard_as_it_was_said(seed: int) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        service = Service()
        sizes = [chance.choice((0, 1, 500, 5 * KiB, 40 * KiB, 70 * KiB)) for _ in range(chance.randint(1, 30))]
        said = body(*(bytes([at % 256]) * size for at, size in enumerate(sizes)))
        early = chance.randint(0, len(said))
        peer = Peer(*said[:early])
        async with service.full():
            task = await service.waits(peer)
            kept = list(itertools.accumulate(max(size, KiB) for size in sizes[: peer.taken]))
            assert not kept[:-1] or kept[-2] < Listened.MAX_KEPT, "no part after the one that passes the bound"
            assert not peer.said or kept[-1] >= Listened.MAX_KEPT, "and all before it"
        while not task.done():
            if early < len(said) and chance.random() < 0.3:
                peer.say(said[early])
                early += 1
            await asyncio.sleep(0)
        await task
        assert (brief(service.heard), service.outcomes) == (brief(said), ["completed"])
        assert is_as_new(service.budget)

    asyncio.run(main())
