"""What ctxalloc costs in Python, as ratios against named peers measured in the same run.

Every variant runs in turn, round after round; the medians are compared. `make bench` prints the tables, keeps the
numbers in target/bench/python.json and draws target/bench/bench.png. Options: --rounds N, --quick.
"""

import argparse
import asyncio
import contextlib
import contextvars
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import numpy_allocator

import ctxalloc
import ctxalloc_example

mpl.use("Agg")
import matplotlib.pyplot as plt

OUT: Final = Path(__file__).parents[1] / "target" / "bench"
Loop = Callable[[int], float]

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


def loop(body: str, **names: Any) -> Loop:
    """`body` n times in a function of its own, as a program has it: names are locals."""
    setup = "".join(f"    {name} = _names[{name!r}]\n" for name in names)
    lines = body.replace("\n", "\n        ")
    source = (
        f"def run(_n):\n{setup}    _r = range(_n)\n    _t = _now()\n    for _ in _r:\n        {lines}\n"
        "    return (_now() - _t) / _n * 1e9\n"
    )
    space: dict[str, Any] = {"_names": names, "_now": time.perf_counter}
    exec(source, space)  # noqa: S102 - our own text: a loop with no call of a body in it
    run: Loop = space["run"]
    return run


def selected(handler: str | None, run: Loop) -> Loop:
    """`run` with a handler selected around all of it."""

    def inside(n: int) -> float:
        with ctxalloc.use(handler):
            return run(n)

    return inside


def allocated_by(peer: Any, run: Loop) -> Loop:
    """`run` under one of numpy-allocator's."""

    def inside(n: int) -> float:
        with peer:
            return run(n)

    return inside


def medians(variants: dict[str, Loop], rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Each variant's median and quartiles in nanoseconds, measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run(max(1, repeats // 10))
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(run(repeats))
    result = {}
    for name, all_times in times.items():
        low, median, high = statistics.quantiles(all_times, n=4)
        result[name] = {"median_ns": median, "quarter_ns": low, "three_quarters_ns": high}
    return result


def table(title: str, rows: dict[str, dict[str, float]], base: str) -> None:
    """Prints the rows with their ratios to `base`."""
    print(f"\n{title}\n{'':44}{'median':>12}{'quarters':>24}{'ratio':>9}")
    for name, row in rows.items():
        quarters = f"{row['quarter_ns']:.1f} .. {row['three_quarters_ns']:.1f}"
        ratio = row["median_ns"] / rows[base]["median_ns"]
        print(f"{name:44}{row['median_ns']:9.1f} ns{quarters:>24}{ratio:8.2f}x", flush=True)


def selection(rounds: int) -> dict[str, dict[str, float]]:
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


def futures(rounds: int) -> dict[str, dict[str, float]]:
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


SIZES: Final = (8, 64, 512, 1024, 4096, 65_536, 1 << 20, 8 << 20, 64 << 20)


def arrays(rounds: int, sizes: Iterable[int]) -> dict[int, dict[str, dict[str, float]]]:
    """`np.empty(n)` and its end, from 8 bytes to 64 MiB."""
    result = {}
    for size in sizes:
        run = loop("e(n, d)", e=np.empty, n=size, d=np.uint8)
        variants = {"NumPy's default": selected(None, run)}
        variants |= {name: selected(name, run) for name in ("system", "aligned64", "pool")}
        variants["numpy-allocator (malloc)"] = allocated_by(forwarding, run)
        rows = medians(variants, rounds, 2000 if size < 1 << 22 else 100)
        table(f"np.empty({size}) and its end", rows, "NumPy's default")
        result[size] = rows
    return result


def picture(scopes: dict[str, dict[str, float]], by_size: dict[int, dict[str, dict[str, float]]], place: Path) -> None:
    """Bars for scopes, lines for arrays."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    names = list(scopes)[:7]
    left.barh(names[::-1], [scopes[name]["median_ns"] for name in names[::-1]], color="#4c78a8")
    left.set(title="a scope, entered and left", xlabel="median, ns")
    sizes = list(by_size)
    for name in by_size[sizes[0]]:
        ratios = [by_size[n][name]["median_ns"] / by_size[n]["NumPy's default"]["median_ns"] for n in sizes]
        right.plot(sizes, ratios, marker="o", label=name)
    right.set(
        xscale="log", yscale="log", title="np.empty(n) and its end", xlabel="bytes", ylabel="time / NumPy's default"
    )
    right.legend()
    right.grid(visible=True, alpha=0.3)
    figure.savefig(place, dpi=110)


def main() -> int:
    """Measures, prints, keeps and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41, help="how often each variant has its turn")
    parser.add_argument("--quick", action="store_true", help="few rounds, few sizes: does it run?")
    options = parser.parse_args()
    rounds, sizes = (5, SIZES[::4]) if options.quick else (options.rounds, SIZES)
    machine = f"{platform.machine()}, CPython {platform.python_version()}, NumPy {np.__version__}"
    print(f"{machine}; {rounds} rounds, medians")
    scopes, awaits, by_size = selection(rounds), futures(rounds), arrays(rounds, sizes)
    OUT.mkdir(parents=True, exist_ok=True)
    numbers = {"machine": machine, "rounds": rounds, "selection": scopes, "futures": awaits, "arrays": by_size}
    (OUT / "python.json").write_text(json.dumps(numbers, indent=1))
    picture(scopes, by_size, OUT / "bench.png")
    print(f"\nkept in {OUT / 'python.json'}, drawn in {OUT / 'bench.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
