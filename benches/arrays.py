"""Arrays made and dropped, per size and per allocator, as ratios to NumPy's default in the same run.

`np.empty`, `np.full`, `np.ones`, `np.zeros` (left alone, and with every page touched) and an expression, under our
handlers, numpy-allocator's, and with jemalloc or mimalloc preloaded (Debian's libjemalloc2, libmimalloc2.0), in turn.
`limit` does the same to arrays whose pages are there, and makes none: no allocator can be faster. Numbers go to
target/bench/arrays.json, the picture beside them.
Options: --rounds N, --quick.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from harness import Loop, Row, keep, loop, machine, row_of, table
from harness.peers import NUMPY_ALLOCATOR, REQUEST, Peer, Process, found_preloads, selection

KIB: Final = 1 << 10
MIB: Final = 1 << 20
EMPTY: Final = (8, 64, 512, 1 * KIB, 4 * KIB, 64 * KIB, 1 * MIB, 8 * MIB, 32 * MIB, 64 * MIB, 256 * MIB)
FULL: Final = (64, 4 * KIB, 64 * KIB, 1 * MIB, 8 * MIB, 64 * MIB, 256 * MIB)
WORKS: Final = {
    "np.empty(n)": EMPTY,
    "np.full(n)": FULL,
    "np.ones(n)": FULL,
    "np.zeros(n)": FULL,
    "np.zeros(n), touched": FULL,
    "a*b + a - b": (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}
DEFAULT: Final = "NumPy's default"
FILLING: Final = "limit (fills what is there)"
IN_PLACE: Final = "limit (out=, into what is there)"
LIMITS: Final = {"np.full(n)": FILLING, "np.ones(n)": FILLING, "a*b + a - b": IN_PLACE}
ENOUGH_NS: Final = 4e6


def work(name: str, size_bytes: int) -> Loop:
    """What is repeated; arrays are dropped as soon as they are made."""
    length = size_bytes // 8
    match name:
        case "np.empty(n)":
            return loop("e(n, d)", e=np.empty, n=size_bytes, d=np.uint8)
        case "np.full(n)":
            return loop("f(n, 1.5)", f=np.full, n=length)
        case "np.ones(n)":
            return loop("o(n)", o=np.ones, n=length)
        case "np.zeros(n)":
            return loop("z(n)", z=np.zeros, n=length)
        case "np.zeros(n), touched":
            return loop("z(n)[::512] = 1.0", z=np.zeros, n=length)  # a page has 512 of them
        case "a*b + a - b":
            a, b = np.full(length, 1.5), np.full(length, 2.5)
            return loop("a*b + a - b", a=a, b=b)
        case _ if name == IN_PLACE:
            a, b, t = np.full(length, 1.5), np.full(length, 2.5), np.full(length, 3.5)
            return loop("m(a, b, t); p(t, a, t); s(t, b, t)", m=np.multiply, p=np.add, s=np.subtract, a=a, b=b, t=t)
    there = np.full(length, 1.5)
    return loop("f(2.5)", f=there.fill)


class Worker:
    """Does one work at a time, the last one kept warm as a program's would be."""

    def __init__(self) -> None:
        self.last: tuple[str, int] | None = None
        self.run: Loop = float

    def __call__(self, question: dict[str, Any]) -> float:
        wanted = (question["work"], question["size"])
        if wanted != self.last:
            self.last, self.run = wanted, work(*wanted)
        with selection(question["handler"]):
            self.run(1 + question["n"] // 8)  # the handler before this one may have left it cold
            return self.run(question["n"])


def peers() -> list[Peer]:
    """Who is measured; the first is what the ratios refer to."""
    ours = [Peer(name, handler=name) for name in ("system", "aligned64", "pool")]
    preloaded = [Peer(f"{name}, preloaded", preload=path) for name, path in found_preloads().items()]
    return [Peer(DEFAULT), *ours, Peer(NUMPY_ALLOCATOR, handler=NUMPY_ALLOCATOR), *preloaded]


def measure(rounds: int, sizes_of: dict[str, Iterable[int]]) -> dict[str, dict[int, dict[str, Row]]]:
    """Every work, size and peer, in turn."""
    results: dict[str, dict[int, dict[str, Row]]] = {}
    everybody = peers()
    with contextlib.ExitStack() as stack:
        processes = {
            preload: stack.enter_context(Process(__file__, preload))
            for preload in dict.fromkeys(peer.preload for peer in everybody)
        }

        def ask(peer: Peer, what: str, size: int, n: int) -> float:
            question = {"work": what, "size": size, "handler": peer.handler, "n": n}
            answer: float = processes[peer.preload].ask(question)
            return answer

        for what, sizes in sizes_of.items():
            results[what] = {}
            for size in sizes:
                turns = [(peer, peer.name, what) for peer in everybody]
                if what in LIMITS:
                    turns.append((everybody[0], LIMITS[what], LIMITS[what]))
                if what == "a*b + a - b":
                    turns.append((Peer(REQUEST, handler=REQUEST), REQUEST, what))
                # As often as takes the same time, for each: between them there are factors of a thousand.
                often = {
                    name: max(1, min(20_000, int(ENOUGH_NS / ask(peer, doing, size, 1)))) for peer, name, doing in turns
                }
                times: dict[str, list[float]] = {name: [] for _, name, _ in turns}
                for _ in range(rounds):
                    for peer, name, doing in turns:
                        times[name].append(ask(peer, doing, size, often[name]))
                rows = {name: row_of(list_of) for name, list_of in times.items()}
                table(f"{what}, {size} bytes, and its end", rows, DEFAULT)
                results[what][size] = rows
    return results


def picture(results: dict[str, dict[int, dict[str, Row]]], path: str) -> None:
    """One panel for each kind of work: time against NumPy's default, by size."""
    import matplotlib as mpl  # noqa: PLC0415 - the workers do not draw

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    shown = ["np.empty(n)", "np.full(n)", "a*b + a - b"]
    figure, panels = plt.subplots(1, len(shown), figsize=(16, 5), layout="constrained")
    for what, panel in zip(shown, panels, strict=True):
        by_size = results[what]
        for name in next(iter(by_size.values())):
            ratios = [rows[name]["median_ns"] / rows[DEFAULT]["median_ns"] for rows in by_size.values()]
            ours = name == "pool"
            panel.plot(
                list(by_size), ratios, marker="o", label=name, linewidth=3 if ours else 1, zorder=3 if ours else 2
            )
        panel.axhline(1, color="black", linewidth=0.5)
        panel.set(xscale="log", yscale="log", title=what, xlabel="bytes", ylabel="time / NumPy's default")
        panel.grid(visible=True, alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measures, prints, keeps and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often each peer has its turn")
    parser.add_argument("--quick", action="store_true", help="few rounds, few sizes: does it run?")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        Process.serve(Worker())
        return 0
    rounds = 3 if options.quick else options.rounds
    print(f"{machine()}; {rounds} rounds, medians")
    results = measure(rounds, {what: sizes[::3] if options.quick else sizes for what, sizes in WORKS.items()})
    place = keep("arrays", {"rounds": rounds, "arrays": results})
    picture(results, str(place.with_suffix(".png")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
