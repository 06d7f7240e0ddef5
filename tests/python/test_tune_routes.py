"""What a recording says of its routes, beside a naive count: of each process, and within a recorded program."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
from recordings import MiB, Script

from ctxalloc import _native, _sizes

ROUTES = ("GET /a", "GET /b")


def command(*words: str | Path, status: int = 0) -> commands.Done:
    """In this process: each replay has one of its own."""
    done = commands.ctxalloc(*words)
    assert done.returncode == status, done
    return done


def run_recorded(folder: Path, program: str) -> Path:
    """What `ctxalloc run --record` records of a program."""
    (folder / "program.py").write_text(program)
    run = [sys.executable, "-W", "error", "-m", "ctxalloc", "run", "--record", "p.trace", "program.py"]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=300, check=True)  # it hangs
    assert done.stderr == ""
    return folder / "p.trace"


def recorded(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Routes by name, and all together."""
    every, whole, *_ = _native._recorded_routes(_native._Recording(path), 100)
    return {route["name"]: route for route in every}, whole


class Counted:
    """What a process has of a route, or of all of them: counted naively."""

    def __init__(self) -> None:
        self.open = self.max_open = self.live = self.max_live = 0
        self.alone: list[tuple[int, int]] = []
        """How long each request took that ran by itself, and what it spent on processors."""

    def add(self, requests: int, size: int) -> None:
        self.open += requests
        self.live += size
        self.max_open, self.max_live = max(self.max_open, self.open), max(self.max_live, self.live)


def served(script: Script, chance: random.Random) -> dict[str, Counted]:
    """Requests that overlap, some of whose blocks escape; what was there of each route, and of all ("")."""
    counts = {name: Counted() for name in (*ROUTES, "")}
    running: list[tuple[str, int, list[int]]] = []
    began: dict[int, int] = {}
    together: set[int] = set()
    sizes: dict[int, tuple[str, int]] = {}

    def add(name: str, requests: int, size: int) -> None:
        counts[name].add(requests, size)
        counts[""].add(requests, size)

    for _ in range(300):
        step = chance.random()
        if step < 0.3 and len(running) < 6:
            name = chance.choice(ROUTES)
            running.append((name, script.begin(name), []))
            began[running[-1][1]] = script.now
            if len(running) > 1:
                together |= {request for _, request, _ in running}
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
            script.end(request, processor_ns=request)
            add(name, -1, 0)
            if request not in together:
                for each in (name, ""):
                    counts[each].alone.append((script.now - began[request], request))
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
        alone = sorted(one for counts in workers for one in counts[name].alone)
        assert sorted(zip(found["alone_ns"], found["alone_processor_ns"], strict=True)) == alone != [], name
    assert _sizes.sizes_of(whole).warm_bytes < 2 * max(counts[""].max_live for counts in workers)


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


PROGRAM = """
import json, sys, threading
import numpy as np
import ctxalloc

np.ones(300_000)
kept = np.ones(50_000)
told = {"step": [], "load": [], "unnamed": []}
left = []

def step(number):
    with ctxalloc.request(name="step") as scope:
        np.ones(10_000 + number)
        with ctxalloc.request(name="load"):  # inside of a route: none
            np.ones(3000)
        if number % 5 == 0:
            left.append(np.ones(2000))
    told["step"].append(scope.stats.peak_bytes)

for number in range(24):
    step(number)
with ctxalloc.request(name="load") as scope:
    np.ones(7)
told["load"].append(scope.stats.peak_bytes)
with ctxalloc.request() as scope:
    np.ones(9)
told["unnamed"].append(scope.stats.peak_bytes)
threads = [threading.Thread(target=step, args=(number,)) for number in range(100, 104)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with open("told.json", "w") as file:
    json.dump(told, file)
"""


def test_what_a_program_does_again_and_again_is_a_route(tmp_path: Path) -> None:
    path = run_recorded(tmp_path, PROGRAM)
    told = json.loads((tmp_path / "told.json").read_text())
    routes, whole = recorded(path)
    assert {name or "unnamed": sorted(route["peak_bytes"]) for name, route in routes.items()} == {
        name: sorted(peaks) for name, peaks in told.items()
    }
    assert whole["requests"] == sum(map(len, told.values())) == len(whole["peak_bytes"])
    assert routes["step"]["escaped_blocks"] == 6  # they live as long as the program
    # Nothing is counted twice: all that each name made itself is what was made.
    names = json.loads(command("trace", "info", path, "--json").stdout)["requests"]
    for what in ("blocks", "total_bytes"):
        assert whole[what] == sum(name[what] for name in names)
        assert whole[what] == sum(one[what] for one in (*routes.values(), *whole["programs"]))
    program = next(name for name in names if name["name"] == "program.py")
    assert (program["requests"], program["peak_bytes"]["max"] > 300_000 * 8) == (1, True)
    assert [(one["name"], one["blocks"]) for one in whole["programs"]] == [("program.py", program["blocks"])]


def test_a_route_of_a_program_is_replayed_and_advised(tmp_path: Path) -> None:
    path = run_recorded(tmp_path, PROGRAM)
    every = json.loads(command("replay", path, "--strategy", "pool", "--rounds", "1", "--json").stdout)
    assert (every["requests"], every["compared"]) == (30, 59), "each inner one, and the program"
    steps = json.loads(
        command("replay", path, "--strategy", "pool", "--rounds", "1", "--json", "--route", "step").stdout
    )
    assert (steps["requests"], steps["compared"], steps["unfinished"]) == (28, 56, 0)
    said = command("replay", path, "--route", "program.py", status=2).stderr
    assert "but for those inside of others, and a program with others inside" in said
    advice = json.loads(command("recommend", path, "--rounds", "3", "--strategy", "pool", "--json").stdout)
    counts = {one["route"]: one["requests"] for one in advice["routes"]}
    assert counts == {"step": 28, "load": 1, "unnamed": 1}
    assert advice["routes"][0]["limit_bytes"] == 128 << 10, "one and a half of np.ones(10_103)"
    said = command("recommend", path, "--route", "program.py", status=2).stderr
    assert "but for those inside of others, and a program with others inside" in said


def test_a_program_without_requests_inside_is_a_route_itself(tmp_path: Path) -> None:
    path = run_recorded(tmp_path, "import numpy as np\nnp.ones(1000)\n")
    routes, whole = recorded(path)
    assert (list(routes), whole["requests"], whole["programs"]) == (["program.py"], 1, [])
    told = command("recommend", path).stdout
    assert "program.py: not known\n" in told
    assert "it is the program, which began no request: put ctxalloc.request(name=...) around what it does" in told
