"""What a selection costs in Python, as ratios against named peers measured in the same run.

Every variant runs in turn, round after round; the medians are compared. `make bench` prints the tables and keeps the
numbers in target/bench/python.json. Options: --rounds N, --quick.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy_allocator
from harness import Loop, Row, keep, loop, medians, rounds_asked, table

import ctxalloc
import ctxalloc_example

_libc = ctypes.CDLL(None)


class forwarding(metaclass=numpy_allocator.type):  # noqa: N801 - as its documentation spells allocators
    """numpy-allocator's way to say malloc: the same functions as our `system`."""

    _malloc_ = ctypes.addressof(_libc.malloc)
    _calloc_ = ctypes.addressof(_libc.calloc)
    _realloc_ = ctypes.addressof(_libc.realloc)
    _free_ = ctypes.addressof(_libc.free)


class PythonScope:
    """The same scope written in Python over a ContextVar of its own."""

    __slots__ = ("token", "value", "var")

    def __init__(self, var: contextvars.ContextVar[object], value: object) -> None:
        self.var = var
        self.value = value

    def __enter__(self) -> object:
        self.token = self.var.set(self.value)
        return self.value

    def __exit__(self, *_: object) -> None:
        self.var.reset(self.token)


def selection(rounds: int) -> dict[str, Row]:
    """Entering and leaving a scope, and its parts."""
    var: contextvars.ContextVar[object] = contextvars.ContextVar("bench")
    handler = ctxalloc.handler("system")
    array = np.empty(8)
    variants = {
        "ContextVar: t = var.set(x); var.reset(t)": loop("t = var.set(x); var.reset(t)", var=var, x=handler),
        "with ctxalloc.use(handler): pass": loop("with use(h):\n    pass", use=ctxalloc.use, h=handler),
        "with a scope made before: pass": loop("with s:\n    pass", s=ctxalloc.use(handler)),
        "t = set_handler(handler); reset(t)": loop(
            "t = s(h); r(t)", s=ctxalloc.set_handler, r=ctxalloc.reset, h=handler
        ),
        "numpy-allocator: with allocator: pass": loop("with a:\n    pass", a=forwarding),
        "a class in Python over a ContextVar": loop("with s(v, h):\n    pass", s=PythonScope, v=var, h=handler),
        "contextlib.nullcontext": loop("with n(h):\n    pass", n=contextlib.nullcontext, h=handler),
        "current()": loop("c()", c=ctxalloc.current),
        "handler_of(array)": loop("o(a)", o=ctxalloc.handler_of, a=array),
        "a Rust function that asks current()": loop("h()", h=ctxalloc_example.handler_here),
    }
    rows = medians(variants, rounds, 5000)
    table("a selection in Python", rows, next(iter(rows)))
    return rows


def futures(rounds: int) -> dict[str, Row]:
    """Awaiting a Rust future against asyncio's own way to another thread."""

    def awaiting(make: Callable[[], Any]) -> Loop:
        async def all_of_them(n: int) -> float:
            begun = time.perf_counter()
            for _ in range(n):
                await make()
            return (time.perf_counter() - begun) / n * 1e9

        return lambda n: asyncio.run(all_of_them(n))

    variants = {
        "asyncio.to_thread(function)": awaiting(lambda: asyncio.to_thread(int)),
        "a Rust future, its handler carried": awaiting(lambda: ctxalloc_example.handlers_on_the_way(0)),
    }
    rows = medians(variants, max(5, rounds // 4), 200)
    table("one await of work elsewhere", rows, next(iter(rows)))
    return rows


def main() -> int:
    """Measures, prints, keeps and draws."""
    rounds = rounds_asked(__doc__)
    keep("python", {"rounds": rounds, "selection": selection(rounds), "futures": futures(rounds)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
