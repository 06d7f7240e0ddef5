"""What a recording says of its routes, beside a naive count: of each process, and within a recorded program."""

import random
from pathlib import Path
from typing import Any

from ctxalloc import _advice, _native
from recordings import MiB, Script

ROUTES = ("GET /a", "GET /b")


def recorded(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Routes by name, and all together."""
    every, whole, *_ = _native._recorded_routes(_native._Recording(path), 100)
    return {route["name"]: route for route in every}, whole


class Counted:
    """What a process has of a route, or of all of them: counted naively."""

    def __init__(self) -> None:
        self.open = self.max_open = self.live = self.max_live = 0

    def add(self, requests: int, size: int) -> None:
        self.open += requests
        self.live += size
        self.max_open, self.max_live = max(self.max_open, self.open), max(self.max_live, self.live)


def served(script: Script, chance: random.Random) -> dict[str, Counted]:
    """Requests that overlap, some of whose blocks escape; what was there of each route, and of all ("")."""
    counts = {name: Counted() for name in (*ROUTES, "")}
    running: list[tuple[str, int, list[int]]] = []
    sizes: dict[int, tuple[str, int]] = {}

    def add(name: str, requests: int, size: int) -> None:
        counts[name].add(requests, size)
        counts[""].add(requests, size)

    for _ in range(300):
        step = chance.random()
        if step < 0.3 and len(running) < 6:
            name = chance.choice(ROUTES)
            running.append((name, script.begin(name), []))
            add(name, 1, 0)
        elif step < 0.7 and running:
            name, request, blocks = chance.choice(running)
            size = chance.randrange(1, MiB)
            blocks.append(script.make(request, size))
            sizes[blocks[-1]] = name, size
            add(name, 0, size)
        elif running:
            name, request, blocks = running.pop(chance.randrange(len(running)))
            for block in blocks:
                if chance.random() < 0.9:
                    script.free(block)
                    add(name, 0, -sizes[block][1])
            script.end(request)
            add(name, -1, 0)
    return counts


def test_what_is_a_processs_is_the_largest_of_any_process(tmp_path: Path) -> None:
    chance = random.Random(26)
    workers = []
    for number in range(4):
        script = Script()
        workers.append(served(script, chance))
        script.write(tmp_path / f"w.trace{f'.{number}' if number else ''}", process=number + 1)
    routes, whole = recorded(tmp_path / "w.trace")
    for name in (*ROUTES, ""):
        found = routes[name] if name else whole
        assert found["peak_live_bytes"] == max(counts[name].max_live for counts in workers), name
        assert found["max_concurrent"] == max(counts[name].max_open for counts in workers), name
    assert _advice.sizes_of(whole).warm_bytes < 2 * max(counts[""].max_live for counts in workers)


def test_a_process_rests_though_others_work(tmp_path: Path) -> None:
    for number in range(2):
        script = Script()
        script.rest(number * 0.5)
        for _ in range(30):
            script.end(script.begin("GET /a"))
            script.rest(1)
        script.write(tmp_path / f"w.trace{f'.{number}' if number else ''}", process=number + 1)
    routes, whole = recorded(tmp_path / "w.trace")
    for found in (routes["GET /a"], whole):
        assert [round(gap / 1e9, 3) for gap in found["gaps_ns"]] == [1.0] * 58
