"""What each route does with a posted picture: short steps in the coroutine, long ones in threads or in a Rust future.

At every ``await`` other requests run, under other handlers. The request's handler is selected when a step starts
(the middleware did it), and what is started from here inherits it; only ``work.scratch`` is selected here. Neighbours:
``processing`` has the steps, ``app`` calls ``ROUTES``.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

import ctxalloc_example

from . import processing
from .audit import Audit, Visit, Witness
from .processing import Picture

Use = Callable[[str], AbstractAsyncContextManager[object]]
"""Selects a handler by name: ``ctxalloc.use``, or what ``control`` and ``reference`` put in its place."""


@dataclass(frozen=True)
class Work:
    """One request: who looks at its arrays, and how to select a handler for a part of them."""

    witness: Witness
    scratch: Witness
    use: Use

    @classmethod
    def begin(cls, audit: Audit, route: str, *, asked: str, scratch: str, use: Use) -> Self:
        """A new request, for which the handlers ``asked`` and ``scratch`` are to be used."""
        visit = Visit()
        return cls(Witness(audit, visit, route, asked), Witness(audit, visit, route, scratch), use)


@dataclass(frozen=True)
class Answer:
    """What goes back to the client."""

    content: bytes
    media_type: str


async def thumbnail(picture: Picture, work: Work) -> Answer:
    """Smoothed in Rust, so that every fourth pixel speaks for its neighbours."""
    smooth = await box_blur(picture, 2, work.witness)
    return await png(processing.shrink(smooth, 4, work.witness.coroutine))


async def blur(picture: Picture, work: Work) -> Answer:
    """Three boxes are nearly a Gaussian."""
    for _ in range(3):
        picture = await box_blur(picture, 4, work.witness)
    return await png(picture)


async def sharpen(picture: Picture, work: Work) -> Answer:
    """The blurred picture is only needed for a moment: it is scratch."""
    async with work.use(work.scratch.asked):
        blurred = await box_blur(picture, 2, work.scratch)
    return await png(await asyncio.to_thread(processing.unsharp, picture, blurred, work.witness.thread))


async def edges(picture: Picture, work: Work) -> Answer:
    """A little blur first: noise has edges too."""
    smooth = await box_blur(picture, 1, work.witness)
    return await png(await asyncio.to_thread(processing.edges, smooth, work.witness.thread))


async def equalize(picture: Picture, work: Work) -> Answer:
    """A table of 256 numbers is made right here; what touches all pixels goes to a thread."""
    made = work.witness.thread
    grey = await asyncio.to_thread(lambda: made(processing.luminance(picture, made).astype("uint8")))
    counts = await asyncio.to_thread(processing.histogram, grey, made)
    table = processing.equalizing_table(counts, work.witness.coroutine)
    return await png(await asyncio.to_thread(processing.brightened, picture, grey, table, made))


async def denoise(picture: Picture, work: Work) -> Answer:
    """Heavy: a hundred full-size arrays on the way, all of them scratch but the answer."""
    async with work.use(work.scratch.asked):
        clean = await asyncio.to_thread(processing.total_variation, picture, work.scratch.thread)
    return await png(await asyncio.to_thread(processing.to_bytes, clean, work.witness.thread))


async def stats(picture: Picture, work: Work) -> Answer:
    """Counting in a thread, sums over 256 bins right here."""
    answer: dict[str, object] = {"height": picture.shape[0], "width": picture.shape[1]}
    for index, channel in enumerate(("red", "green", "blue")):
        values = work.witness.coroutine(picture[:, :, index])
        counts = await asyncio.to_thread(processing.histogram, values, work.witness.thread)
        answer[channel] = processing.summary(counts, work.witness.coroutine)
    return Answer(json.dumps(answer).encode(), "application/json")


Pipeline = Callable[[Picture, Work], Awaitable[Answer]]

ROUTES: Final[Mapping[str, Pipeline]] = MappingProxyType(
    {
        "/thumbnail": thumbnail,
        "/blur": blur,
        "/sharpen": sharpen,
        "/edges": edges,
        "/equalize": equalize,
        "/denoise": denoise,
        "/stats": stats,
    }
)


async def answer(route: str, body: bytes, work: Work) -> Answer:
    """Everything that is done to a posted picture. PictureError: the body is not a picture."""
    picture = await asyncio.to_thread(processing.decode, body, work.witness.thread)
    return await ROUTES[route](picture, work)


async def box_blur(picture: Picture, radius: int, witness: Witness) -> Picture:
    """A Rust future: computed on tokio's threads, its array made there in the handler of this call."""
    blurred: Picture = await ctxalloc_example.box_blur(picture, radius)
    return witness.rust(blurred)


async def png(picture: Picture) -> Answer:
    """A PNG file, packed in a thread."""
    return Answer(await asyncio.to_thread(processing.encode, picture), "image/png")
