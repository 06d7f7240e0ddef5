"""``ctxalloc trace``: what it says is what the events say, and it takes no more memory than the recording has bytes."""

import collections
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import commands
import pytest
import recordings
from recordings import ALLOCATE, BEGIN, END, FREE, change, frame, number, text
from subprocesses import run

from ctxalloc._native import _Recording

BESIDE = 8 << 20
"""What may be taken beside the files' length."""

Events: TypeAlias = Iterator[tuple[int, int, int | None, bytes]]
"""Of each its kind, its request, its block and what follows."""

FORMATS = ("rmm.csv", "perfetto", "pprof")


def process() -> bytes:
    said = b"\0" + number(1) + text("0.1.0") + text("linux x86_64")
    return frame(said + b"".join(map(number, (4096, 2, 5, 1, 10_000))))


def named(kind: int, at: int, name: str) -> bytes:
    return frame(bytes([kind]) + number(at) + text(name))


def bodies(events: Events) -> Iterator[bytes]:
    """Frames of events a nanosecond apart."""
    body, request, block = bytearray(b"\x01"), 0, 0
    for at, (kind, its, changed, rest) in enumerate(events):
        body.append(kind | (0x10 if its != request else 0))
        body += number(at if len(body) == 2 else 1)
        if its != request:
            body += change(request, its)
            request = its
        if changed is not None:
            body += change(block, changed)
            block = changed
        body += rest
        if len(body) > 16_000:
            yield frame(bytes(body))
            body, request, block = bytearray(b"\x01"), 0, 0
    yield frame(bytes(body))


MANY = 200_000


def alive() -> Events:
    """One request with many small blocks, all of them alive, which are freed in any order."""
    yield BEGIN, 1, None, bytes(3)
    blocks = list(range(1, MANY))
    for block in blocks:
        yield ALLOCATE, 1, block, b"\x01\x00"
    random.Random(1).shuffle(blocks)
    for block in blocks:
        yield FREE, 1, block, b""


def finished() -> Events:
    """Requests that do nothing, one after the other."""
    for request in range(1, MANY):
        yield BEGIN, request, None, bytes(3)
        yield END, request, None, bytes(5)


def unfinished() -> Events:
    """Requests that never end, each inside of the one before it."""
    for request in range(1, MANY):
        yield BEGIN, request, None, bytes(2) + number(request - 1)


def of_many_names() -> Events:
    for request in range(1, 16_000):
        yield BEGIN, request, None, number(request) + bytes(2)
        yield ALLOCATE, request, request, b"\x64\x00"
        yield END, request, None, bytes(5)


def of_long_names() -> Events:
    for request in range(1, 9):
        yield BEGIN, request, None, number(request) + bytes(2)


HOSTILE: dict[str, tuple[Callable[[], Events], list[str]]] = {
    "blocks": (alive, ["a"]),
    "requests": (finished, ["a"]),
    "requests inside of requests": (unfinished, ["a"]),
    "names": (of_many_names, [f"{at:x}" for at in range(16_000)]),
    "long names": (of_long_names, [chr(0x4E00 + at) * 100_000 for at in range(9)]),
}

MEASURES = """
import ctypes, os, sys, json, zlib, gzip, textwrap, numpy, ctxalloc
from ctxalloc import _command
from resident import highest_rss
def map_libraries():  # how much of a file one page fault maps is the page cache's affair
    with open("/proc/self/maps") as maps:
        places = [line.split()[0].split("-") for line in maps if ".so" in line]
    for begin, end in [[int(at, 16) for at in place] for place in places]:
        populate_read = 22
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), populate_read)
def measured(words):
    map_libraries()
    before = highest_rss()
    status = _command.main(words)
    print(status, highest_rss() - before, file=sys.stderr)
"""

EACH = (
    MEASURES
    + """
# Each in a child of fork, whose peak begins at what it has: one start for all of them.
for words in json.loads({commands!r}):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            measured(words)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, words
    print("--", file=sys.stderr)
"""
)


@pytest.mark.long
@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", HOSTILE)
def test_no_more_memory_than_the_file_has(what: str, tmp_path: Path) -> None:
    events, names = HOSTILE[what]
    path = tmp_path / "hostile"
    told = [process(), *(named(2, at, name) for at, name in enumerate(names)), named(3, 0, "System"), *bodies(events())]
    path.write_bytes(recordings.MAGIC + b"".join(told))
    most = path.stat().st_size + BESIDE + (1 << 20)  # Python's own parts of what is written
    exports = [["export", "--to", kind, "--output", str(tmp_path / kind)] for kind in FORMATS]
    each = [["trace", *words, str(path)] for words in (["info"], ["info", "--json"], *exports)]
    code, _out, err = run(EACH.replace("{commands!r}", repr(json.dumps(each))))
    assert code == 0, err
    *parts, end = err.split("--\n")
    assert (len(parts), end) == (len(each), "")
    for words, part in zip(each, parts, strict=True):
        *said, (status, taken) = (line.split() for line in part.splitlines())
        assert status == "0" or (status == "2" and "byte" in part and "more memory than its bytes" in part), part
        assert int(taken) <= most, f"{words}: {int(taken)} bytes for {path.stat().st_size}, {said}"


def quantiles(values: list[int], unit: float = 1) -> dict[str, float] | None:
    found = sorted(values)
    at = {f"p{share}": math.ceil(len(found) * share / 100) - 1 for share in (50, 95, 99)}
    return {**{name: found[one] / unit for name, one in at.items()}, "max": found[-1] / unit} if found else None


def naive(path: Path) -> list[dict[str, Any]]:
    """What ``trace info --json`` says of each name, from all events at once."""
    recording = _Recording(path)
    rows: dict[int, dict[str, Any]] = {}
    lists: dict[int, dict[str, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    sizes: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    name_of: dict[int, int] = {}
    around: dict[int, int] = {}
    begun: dict[int, int] = {}
    live: dict[int, list[int]] = {}
    # Of requests that a thread has ended, until it does something else in a request: what is left of them.
    ended: dict[int, list[tuple[int, set[int], list[int]]]] = collections.defaultdict(list)

    def settle(thread: int) -> None:
        for row, blocks, left in ended.pop(thread, ()):
            rows[row]["escaped_blocks"] += len(blocks)
            rows[row]["escaped_bytes"] += left[0]

    for at_ns, thread, request, kind, numbers in recording.events(0, 1 << 30):
        if kind != "free":
            settle(thread)
        if kind == "begin":
            name_of[request], around[request], begun[request] = numbers[0], numbers[2], at_ns
            row = rows.setdefault(numbers[0], collections.defaultdict(int))
            row["requests"] += 1
            row["handlers"] = {recording.handlers[numbers[1]]: row["requests"]}
            continue
        name = name_of[request]
        row = rows[name]
        if kind == "allocate":
            live[numbers[0]] = [request, thread, at_ns, numbers[1]]
            row["blocks"] += 1
            row["total_bytes"] += numbers[1]
            row["zeroed_blocks"] += numbers[3]
            sizes[name][1 << max(numbers[1] - 1, 0).bit_length()] += 1
        elif kind == "resize":
            row["resizes"] += 1
            row["moved"] += numbers[2]
            row["total_bytes"] += max(numbers[1] - live[numbers[0]][3], 0)
            live[numbers[0]][3] = numbers[1]
        elif kind == "free":
            _request, its_thread, made_ns, size = live.pop(numbers[0])
            for _name, its_blocks, left in (one for ends in ended.values() for one in ends):
                if numbers[0] in its_blocks:
                    its_blocks.remove(numbers[0])
                    left[0] = max(0, left[0] - size)
            row["freed_on_other_threads"] += its_thread != thread
            lists[name]["lifetimes"].append(at_ns - made_ns)
        elif kind == "end":
            lists[name]["peaks"].append(numbers[0])
            lists[name]["seconds"].append(at_ns - begun[request])
            inside = {request}
            for one, outer in around.items():  # an outer one has begun before
                inside |= {one} if outer in inside else set()
            left_behind = {number for number, block in live.items() if block[0] in inside}
            ended[thread].append((name, left_behind, [numbers[3]]))
    for thread in list(ended):
        settle(thread)
    return [
        {
            **row,
            "name": recording.names[name],
            "ended": len(lists[name]["peaks"]),
            "peak_bytes": quantiles(lists[name]["peaks"]),
            "seconds": quantiles(lists[name]["seconds"], 1e9),
            "lifetime_seconds": quantiles(lists[name]["lifetimes"], 1e9),
            "sizes": [{"up_to_bytes": size, "blocks": sizes[name][size]} for size in sorted(sizes[name])],
        }
        for name, row in sorted(rows.items(), key=lambda one: -one[1]["total_bytes"])
    ]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_told_is_what_the_events_say(seed: int, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    made, requests, blocks = recordings.Script(), [], []
    names: dict[int, str] = {}
    for _ in range(2000):
        thread, what = random_.randrange(3), random_.randrange(9)
        if what == 0 or not requests:
            name = random_.choice("abcd")
            requests.append(made.begin(name, thread))
            names[requests[-1]] = name
        elif what == 1:
            made.end(requests.pop(random_.randrange(len(requests))), thread)
        elif what < 5:
            size = random_.randrange(1 << random_.randrange(1, 20))
            blocks.append(made.make(random_.choice(requests), size, thread, zeroed=what == 2))
        elif what == 5 and blocks:
            made.resize(random_.choice(blocks), random_.randrange(5000), thread)
        elif blocks:
            made.free(blocks.pop(random_.randrange(len(blocks))), thread)
    path = made.write(tmp_path / "trace")
    done = commands.ctxalloc("trace", "info", "--json", path)
    told = json.loads(done.stdout)
    assert done.stdout == json.dumps(told, indent=2) + "\n"
    counts = (
        "refused refused_allocations with_others escaped_bytes escaped_blocks freed_on_other_threads blocks total_bytes"
    )
    zero = dict.fromkeys([*counts.split(), "zeroed_blocks", "resizes", "moved"], 0)
    assert told["requests"] == [{**zero, **row} for row in naive(path)]
    # A second reading for each: what is alive at each time is the same.
    assert commands.ctxalloc("trace", "export", "--to", "perfetto", path).returncode == 0
    live: dict[str, int] = {}
    for event in json.loads(path.with_name("trace.perfetto.json").read_text())["traceEvents"]:
        if event["ph"] == "C":
            live[event["name"]] = event["args"]["live"]
    kept = collections.Counter[str]()
    for request, size in made.sizes.values():
        kept[f"{names[request]} bytes"] += size
    assert {name: size for name, size in live.items() if size} == {name: size for name, size in kept.items() if size}
