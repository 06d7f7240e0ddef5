"""What `ctxalloc.request()` costs, beside a ContextVar, and what arrays made inside of one cost beside NumPy's default.

The aims of the table: entering and leaving with nothing allocated within 0.6 us; an array inside within the default's
time + 15 ns (by how much more a hundred take than ten; what a request with arrays costs besides is named too); a
million arrays alive at one time within 1.3 times what they cost under `pool`. Every variant runs in turn, round after
round; the medians are compared. Numbers go to target/bench/requests.json. Options: --rounds N, --quick.
"""

import asyncio
import contextvars
import sys
import time
from typing import Any

import numpy as np
from harness import Row, keep, loop, medians, rounds_asked, table

import ctxalloc

AIM_EMPTY_NS = 600.0
AIM_ARRAY_NS = 15.0
LIVE = 1_000_000
FEW, MANY = 10, 100


def inside(scope: str, body: str) -> str:
    """A `with` block."""
    return f"with {scope}:\n" + "\n".join("    " + line for line in body.split("\n"))


def empty_ones(rounds: int) -> dict[str, Row]:
    """Entering and leaving, nothing allocated."""
    var: contextvars.ContextVar[object] = contextvars.ContextVar("bench")
    tenant = ctxalloc.Budget(1 << 30, parent=ctxalloc.Budget(1 << 40))
    names: dict[str, Any] = {"request": ctxalloc.request, "tenant": tenant}

    async def many(n: int) -> float:
        request = ctxalloc.request
        begun = time.perf_counter()
        for _ in range(n):
            async with request():
                pass
        return (time.perf_counter() - begun) / n * 1e9

    variants = {
        "ContextVar: t = var.set(x); var.reset(t)": loop("t = var.set(x); var.reset(t)", var=var, x=1),
        "with ctxalloc.use(handler): pass": loop(
            "with use(h):\n    pass", use=ctxalloc.use, h=ctxalloc.handler("pool")
        ),
        "with ctxalloc.request(): pass": loop(inside("request()", "pass"), **names),
        "with a limit, a name and a budget": loop(
            inside("request(limit_bytes=1000, name='bench', budget=tenant)", "pass"), **names
        ),
        "a request in a request": loop(inside("request()", inside("request()", "pass")), **names),
        "async with ctxalloc.request(): pass": lambda n: asyncio.run(many(n)),
        "the same, and scope.stats read": loop("with request() as s:\n    pass\ns.stats", **names),
    }
    rows = medians(variants, rounds, 3000)
    table("a request with nothing in it", rows, next(iter(rows)))
    return rows


def with_arrays(rounds: int, size: int, count: int) -> dict[str, Row]:
    """So many arrays of `size` bytes made and dropped inside, one by one and all at once."""
    names: dict[str, Any] = {"empty": np.empty, "size": size // 8, "many": range(count)}
    use = {"use": ctxalloc.use, "h": ctxalloc.handler("pool")}
    one_by_one, at_once = "for _i in many:\n    empty(size)", "a = [empty(size) for _i in many]; del a"
    variants = {
        "NumPy's default": loop(one_by_one, **names),
        "with ctxalloc.use('pool')": loop(inside("use(h)", one_by_one), **names, **use),
        "with ctxalloc.request()": loop(inside("request()", one_by_one), request=ctxalloc.request, **names),
        "NumPy's default, at once": loop(at_once, **names),
        "with ctxalloc.request(), at once": loop(inside("request()", at_once), request=ctxalloc.request, **names),
    }
    rows = medians(variants, rounds, 20_000 // count)
    table(f"{count} arrays of {size} bytes", rows, next(iter(rows)))
    return rows


def beyond(few: dict[str, Row], many: dict[str, Row], how: str, entering: float) -> dict[str, float]:
    """What an array in a request costs beyond NumPy's default, and what else a request costs when it has arrays."""

    def more(rows: dict[str, Row]) -> float:
        return rows[f"with ctxalloc.request(){how}"]["median_ns"] - rows[f"NumPy's default{how}"]["median_ns"]

    each = (more(many) - more(few)) / (MANY - FEW)
    return {"each_ns": each, "besides_ns": more(few) - FEW * each - entering}


def many_alive(rounds: int) -> dict[str, Row]:
    """A million small arrays alive at one time, made and dropped."""
    names: dict[str, Any] = {"empty": np.empty, "many": range(LIVE)}
    use = {"use": ctxalloc.use, "h": ctxalloc.handler("pool")}
    body = "a = [empty(10) for _i in many]; del a"
    variants = {
        "NumPy's default": loop(body, **names),
        "with ctxalloc.use('pool')": loop(inside("use(h)", body), **use, **names),
        "with ctxalloc.request()": loop(inside("request()", body), request=ctxalloc.request, **names),
    }
    rows = medians(variants, rounds, 1)
    table("a million arrays of 80 bytes", rows, next(iter(rows)))
    return rows


def main() -> int:
    """Measures, prints, says what missed its aim, and keeps."""
    rounds = rounds_asked(__doc__)
    empty = empty_ones(rounds)
    entering = empty["with ctxalloc.request(): pass"]["median_ns"]
    arrays: dict[str, dict[str, dict[str, float]]] = {}
    for size in (800, 8000):
        few, many = (with_arrays(rounds, size, count) for count in (FEW, MANY))
        arrays[str(size)] = {
            how: beyond(few, many, end, entering) for how, end in (("one by one", ""), ("at once", ", at once"))
        }
    live = many_alive(5)
    print(f"\n{'entering and leaving':44}{entering:9.1f} ns  {'kept' if entering <= AIM_EMPTY_NS else 'MISSED'}")
    for size_text, rows in arrays.items():
        for how, more in rows.items():
            what, each = f"an array of {size_text} bytes, {how}", more["each_ns"]
            print(f"{what:44}{each:+9.1f} ns  {'kept' if each <= AIM_ARRAY_NS else 'MISSED'}", end="")
            print(f"; besides, a request with arrays {more['besides_ns']:+.0f} ns")
    keep("requests", {"rounds": rounds, "empty": empty, "arrays": arrays, "live": live})
    return 0


if __name__ == "__main__":
    sys.exit(main())
