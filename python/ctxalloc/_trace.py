"""``ctxalloc trace``: what a recording says, as a table, and as files that other tools read."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from ctxalloc import _files, _flame, _gaps
from ctxalloc._native import _Recording
from ctxalloc._profile import Frame, Sums
from ctxalloc._program import UsageError
from ctxalloc._sites import UNNAMED
from ctxalloc._text import counted, size_text, table

SUFFIXES: Final = {"rmm.csv": ".rmm.csv", "pprof": ".pb.gz", "perfetto": ".perfetto.json"}
"""What a recording is exported to, and how the file's name ends."""

_MAGIC: Final = b"\x89CTXREC"
"""How a recording begins."""

_AT_ONCE: Final = 50_000
"""How many events are in Python at one time."""


class Event(NamedTuple):
    """One of a recording's events; what ``numbers`` are, its kind says (src/recording/event.rs)."""

    at_ns: int
    thread: int
    request: int
    kind: str
    numbers: list[int]


class Trace:
    """A recording that was read. UsageError: there is none, or nothing of it can be read."""

    def __init__(self, path: Path) -> None:
        try:
            self.recording = _Recording(path)
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from None
        self.names = [name or UNNAMED for name in self.recording.names]

    def events(self) -> Iterator[Event]:
        """All of them, the oldest first. UsageError: a file cannot be read any more, or was changed."""
        start = 0
        while found := self._some(start):
            yield from (Event(*event) for event in found)
            start += len(found)

    def _some(self, start: int) -> list[tuple[int, int, int, str, list[int]]]:
        try:
            return self.recording.events(start, _AT_ONCE)
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from None


class _Route:
    """What the requests of one name did."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests = 0
        self.handlers: Counter[str] = Counter()
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self.lifetimes: list[float] = []
        self.sizes: Counter[int] = Counter()
        self.blocks = self.total_bytes = self.zeroed = self.resizes = self.moved = 0
        self.refused = self.refused_allocations = 0
        self.escaped = self.escaped_bytes = self.freed_elsewhere = 0

    def known(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "requests": self.requests,
            "ended": len(self.peaks),
            "handlers": dict(self.handlers),
            "peak_bytes": _quantiles(self.peaks),
            "seconds": _quantiles(self.seconds),
            "blocks": self.blocks,
            "total_bytes": self.total_bytes,
            "zeroed_blocks": self.zeroed,
            "resizes": self.resizes,
            "moved": self.moved,
            "refused": self.refused,
            "refused_allocations": self.refused_allocations,
            "escaped_blocks": self.escaped,
            "escaped_bytes": self.escaped_bytes,
            "freed_on_other_threads": self.freed_elsewhere,
            "lifetime_seconds": _quantiles(self.lifetimes),
            "sizes": [{"up_to_bytes": 1 << log, "blocks": self.sizes[log]} for log in sorted(self.sizes)],
        }


def _quantiles(values: list[Any]) -> dict[str, Any] | None:
    if not values:
        return None
    found = sorted(values)
    at = {f"p{share}": found[min(len(found) - 1, math.ceil(len(found) * share / 100) - 1)] for share in (50, 95, 99)}
    return {**at, "max": found[-1]}


class _Block(NamedTuple):
    request: int
    thread: int
    at_ns: int
    size: int


def _routes(trace: Trace) -> tuple[list[_Route], int, int]:
    """What each name's requests did; how many events there are, and how many nanoseconds they span."""
    routes: dict[int, _Route] = {}
    of: dict[int, tuple[_Route, int]] = {}
    live: dict[int, _Block] = {}
    # A request's blocks are also those of the requests around it, as its bytes are.
    parents: dict[int, int] = {}
    alive: Counter[int] = Counter()

    def add(request: int, blocks: int) -> None:
        while request:
            alive[request] += blocks
            request = parents[request]

    handlers = trace.recording.handlers
    count = first = last = 0
    for event in trace.events():
        first, last = (event.at_ns if count == 0 else first), event.at_ns
        count += 1
        numbers = event.numbers
        if event.kind == "begin":
            route = routes.setdefault(numbers[0], _Route(trace.names[numbers[0]]))
            of[event.request] = route, event.at_ns
            parents[event.request] = numbers[2]
            route.requests += 1
            route.handlers[handlers[numbers[1]]] += 1
            continue
        route, begun = of[event.request]
        if event.kind == "allocate":
            block, size, _align, zeroed = numbers
            live[block] = _Block(event.request, event.thread, event.at_ns, size)
            add(event.request, 1)
            route.blocks += 1
            route.total_bytes += size
            route.zeroed += zeroed
            route.sizes[max(size - 1, 0).bit_length()] += 1
        elif event.kind == "resize":
            block, size, moved = numbers
            before = live[block]
            route.resizes += 1
            route.moved += moved
            route.total_bytes += max(size - before.size, 0)
            live[block] = before._replace(size=size)
        elif event.kind == "free":
            gone = live.pop(numbers[0])
            add(gone.request, -1)
            route.lifetimes.append((event.at_ns - gone.at_ns) / 1e9)
            route.freed_elsewhere += gone.thread != event.thread
        elif event.kind == "refused":
            # `refused` as in `stats`: where the limit was that is to be raised; a budget's: where it was asked for. And
            # `refused_allocations` as in the metrics, and in the request's end: where it was asked for.
            route.refused_allocations += 1
            limited = of.get(numbers[1])
            (route if limited is None else limited[0]).refused += 1
        elif event.kind == "end":
            route.peaks.append(numbers[0])
            route.seconds.append((event.at_ns - begun) / 1e9)
            route.escaped_bytes += numbers[3]
            route.escaped += alive[event.request]
    return [routes[name] for name in routes], count, last - first


def _seconds_text(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def print_info(path: Path, out: TextIO, *, is_json: bool) -> None:
    """What the recording has, by name of request."""
    trace = Trace(path)
    recording = trace.recording
    routes, events, span_ns = _routes(trace)
    routes.sort(key=lambda route: -route.total_bytes)
    header = recording.header
    version, system, page_bytes, cores, began, one_in, highest, share, processes, file_bytes, other, missing = header
    if is_json:
        known = {
            "version": version,
            "system": system,
            "page_bytes": page_bytes,
            "cores": cores,
            "began_unix_ns": began,
            "one_in": one_in,
            "highest_one_in": highest,
            "share": share,
            "processes": processes,
            "file_bytes": file_bytes,
            "other_requests": other,
            "missing_requests": missing,
            "events": events,
            "seconds": span_ns / 1e9,
            "is_cut_off": recording.is_cut_off,
            "skipped_events": recording.skipped,
            "gaps": _gaps.as_json(recording.gaps),
            "requests": [route.known() for route in routes],
        }
        print(json.dumps(known, indent=2), file=out)
        return
    requests = sum(route.requests for route in routes)
    print(
        f"{path}: {counted(requests, 'request')}, {counted(events, 'event')} in {span_ns / 1e9:.3g} s, "
        f"{size_text(file_bytes)}, {counted(processes, 'process', 'es')}",
        file=out,
    )
    rate = f"1 request in {one_in}" if highest == one_in else f"1 request in {one_in}, at times 1 in {highest}"
    if version:
        print(f"  recorded {rate}, by ctxalloc {version} on {system}, {cores} processors", file=out)
    for text in _gaps.texts_of(recording.gaps):
        print(f"  {text}", file=out)
    if recording.is_cut_off:
        print("  its end is missing: a process was killed, still records, or could not write to the file", file=out)
    if other:
        said = f"{counted(other, 'request')} called (other), or with a handler that is"
        print(f"  {said}: names take a quarter of a file at most, and 4096 are told apart", file=out)
    if missing:
        said = f"{counted(missing, 'recorded request')} missing"
        print(f"  {said}: they began in a file that is there no more, in a gap, or were not written", file=out)
    if recording.skipped:
        said = f"{counted(recording.skipped, 'event')} left out"
        print(f"  {said}: what they belong to began in a file that is there no more, or in a gap", file=out)
    heads = ("requests", "count", "peak p50", "p95", "max", "escaped", "own blocks", "own bytes", "lifetime p50")
    rows = [_row(route) for route in routes]
    table("by name", (*heads, "refused"), rows, out)
    print(
        "  peak and escaped are of accounts: with what requests inside made; refused: by the limits of these requests",
        file=out,
    )
    sizes: Counter[int] = sum((route.sizes for route in routes), Counter())
    table(
        "blocks by size",
        ("up to", "blocks"),
        [(size_text(1 << log), str(sizes[log])) for log in sorted(sizes)],
        out,
    )


def _row(route: _Route) -> tuple[str, ...]:
    peaks, lifetimes = _quantiles(route.peaks), _quantiles(route.lifetimes)
    peak = ("", "", "") if peaks is None else tuple(size_text(peaks[one]) for one in ("p50", "p95", "max"))
    return (
        route.name,
        str(route.requests),
        *peak,
        size_text(route.escaped_bytes),
        str(route.blocks),
        size_text(route.total_bytes),
        "" if lifetimes is None else _seconds_text(lifetimes["p50"]),
        str(route.refused),
    )


def export(path: Path, to: str, output: Path | None) -> Path:
    """Writes the recording in another format; where. UsageError: it cannot be read or written."""
    trace = Trace(path)
    _gaps.warn("trace", trace.recording.gaps)
    target = output or path.with_name(path.name + SUFFIXES[to])
    check_output(target)
    try:
        where = _files.target_of(target)
        if to == "pprof":
            where.write(_pprof(trace))
        else:
            where.write_parts(line.encode() for line in (_rmm(trace) if to == "rmm.csv" else _perfetto(trace)))
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}") from None
    return target


def check_output(target: Path) -> None:
    """UsageError: what is to be written would replace a recording."""
    try:
        if not target.is_file():
            return
        with target.open("rb") as file:
            begun = file.read(len(_MAGIC))
    except OSError:  # it cannot be read: whoever writes it sees
        return
    if begun == _MAGIC:
        raise UsageError(f"{target} is a recording; name another file with --output")


def _rmm(trace: Trace) -> Iterator[str]:
    """The log of RMM's logging adaptor, which its REPLAY_BENCHMARK reads. A resize is an allocation and a free."""
    yield "Thread,Time,Action,Pointer,Size,Stream\n"
    live: dict[int, tuple[int, int]] = {}
    pointers = 0

    def line(event: Event, action: str, pointer: int, size: int) -> str:
        seconds, micros = divmod(event.at_ns // 1000, 1_000_000)
        at = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}:{micros:06}"
        return f"{event.thread},{at},{action},{pointer << 8:#x},{size},0x0\n"

    for event in trace.events():
        if event.kind in ("allocate", "resize"):
            block, size = event.numbers[:2]
            pointers += 1
            yield line(event, "allocate", pointers, size)
            if event.kind == "resize":
                yield line(event, "free", *live[block])
            live[block] = pointers, size
        elif event.kind == "free":
            yield line(event, "free", *live.pop(event.numbers[0]))


def _pprof(trace: Trace) -> bytes:
    """By name of request and by size, as pprof's ``profile.proto``."""
    stacks: dict[tuple[str, int], list[int]] = {}
    live: dict[int, tuple[tuple[str, int], int]] = {}
    names: dict[int, str] = {}
    alive = peak = 0

    def change(key: tuple[str, int], size: int) -> None:
        nonlocal alive
        stacks.setdefault(key, [0, 0, 0, 0])[2] += size
        alive += size

    # Twice: what was alive at the peak is known once the peak is.
    for is_second in (False, True):
        highest, alive, peak_is_past = peak, 0, False
        stacks = {key: [0, 0, 0, numbers[3]] for key, numbers in stacks.items()}
        live.clear()
        for event in trace.events():
            if event.kind == "begin":
                names[event.request] = trace.names[event.numbers[0]]
            elif event.kind == "allocate":
                block, size = event.numbers[:2]
                key = names[event.request], max(size - 1, 0).bit_length()
                live[block] = key, size
                change(key, size)
                stacks[key][0] += 1
                stacks[key][1] += size
            elif event.kind == "resize":
                block, size = event.numbers[:2]
                key, before = live[block]
                live[block] = key, size
                change(key, size - before)
                stacks[key][1] += max(size - before, 0)
            elif event.kind == "free":
                key, before = live.pop(event.numbers[0])
                change(key, -before)
            peak = max(peak, alive)
            if is_second and not peak_is_past and alive == highest:
                peak_is_past = True
                for numbers in stacks.values():
                    numbers[3] = numbers[2]

    def frames(key: tuple[str, int]) -> list[Frame]:
        name, log = key
        return [("", 0, f"blocks up to {size_text(1 << log)}"), ("", 0, name)]

    found = [
        (frames(key), Sums(live_bytes, at_peak, at_peak, total, blocks))
        for key, (blocks, total, live_bytes, at_peak) in stacks.items()
    ]
    return _flame.pprof_of(found)


def _perfetto(trace: Trace) -> Iterator[str]:
    """Chrome's JSON: a counter of live bytes for each name, and the requests as slices of their own tracks."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    yield from _joined(_chrome(trace))
    yield "]}\n"


def _joined(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    before = ""
    for event in events:
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"
    yield "\n"


def _chrome(trace: Trace) -> Iterator[dict[str, Any]]:
    live: dict[int, int] = {}
    sums: Counter[str] = Counter()
    names: dict[int, str] = {}
    for event in trace.events():
        at = {"ts": event.at_ns / 1000, "pid": 1, "tid": event.thread}
        if event.kind == "begin":
            names[event.request] = trace.names[event.numbers[0]]
        name = names[event.request]
        if event.kind in ("begin", "end"):
            arguments = {}
            if event.kind == "end":
                keys = ("peak_bytes", "total_bytes", "blocks", "live_bytes", "refused")
                arguments = dict(zip(keys, event.numbers, strict=True))
            phase = "b" if event.kind == "begin" else "e"
            yield {"name": name, "cat": "request", "ph": phase, "id": event.request, **at, "args": arguments}
        elif event.kind == "refused":
            refused = {"bytes": event.numbers[0]}
            yield {"name": f"{name} refused", "cat": "request", "ph": "i", "s": "t", **at, "args": refused}
        else:
            block = event.numbers[0]
            before = live.pop(block, 0)
            after = 0 if event.kind == "free" else event.numbers[1]
            if after:
                live[block] = after
            sums[name] += after - before
            yield {"name": f"{name} bytes", "ph": "C", **at, "args": {"live": sums[name]}}
