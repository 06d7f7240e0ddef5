"""Functions that run in workers: importable there, as a user's modules are."""

import os
from typing import Any

import numpy as np

import ctxalloc

MIB = 1 << 20


def ones(size_bytes: int, *_: object) -> Any:
    """An array of that size."""
    return np.ones(size_bytes, np.uint8)


def total(size_bytes: int, *_: object) -> int:
    """The sum of an array that does not outlive the task."""
    return int(np.ones(size_bytes, np.uint8).sum(dtype=np.int64))


def spread(size_bytes: int, *_: object) -> int:
    """The same, in steps of a MiB that are all kept: an array at once would be refused before it exists."""
    kept = [np.ones(MIB, np.uint8) for _ in range(size_bytes // MIB)]
    return len(kept)


async def total_async(size_bytes: int) -> int:
    """As `total`, on the worker's event loop."""
    return total(size_bytes)


def where(*_: object) -> tuple[str | None, int | None]:
    """The name of the running request, and its peak."""
    request = ctxalloc.current_request()
    kept = np.empty(1000)
    return (None, None) if request is None else (request.name, request.stats.peak_bytes - kept.nbytes)


async def where_async() -> tuple[str | None, int | None]:
    """The same, on the worker's event loop."""
    return where()


def handler_of_new() -> str | None:
    """The handler of an array that is made here."""
    return ctxalloc.get_handler_name(np.ones(10))


def pid(*_: object) -> int:
    """The worker's process."""
    return os.getpid()


class Store:
    """An actor."""

    def __init__(self, size_bytes: int = 8) -> None:
        self.kept = [np.ones(size_bytes, np.uint8)]

    def add(self, size_bytes: int) -> int:
        """Keep an array."""
        self.kept.append(np.ones(size_bytes, np.uint8))
        return len(self.kept)

    async def add_async(self, size_bytes: int) -> int:
        """The same, on the event loop."""
        return self.add(size_bytes)

    def where(self) -> tuple[str | None, int | None]:
        """As the function."""
        return where()

    async def where_async(self) -> tuple[str | None, int | None]:
        """The same, on the event loop."""
        return where()
