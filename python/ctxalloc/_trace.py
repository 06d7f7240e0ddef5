"""``ctxalloc trace``: what a recording says, as a table, and as files that other tools read.

``src/tune/trace`` reads the events and makes the files, in no more memory than the recording has bytes; here a row or a
part of a file is held at a time.
"""

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, overload

from ctxalloc import _files, _gaps
from ctxalloc._native import _RecordedInfo, _Recording
from ctxalloc._program import UsageError
from ctxalloc._text import counted, printable, shortened, size_text, table

SUFFIXES: Final = {"rmm.csv": ".rmm.csv", "pprof": ".pb.gz", "perfetto": ".perfetto.json"}
"""What a recording is exported to, and how the file's name ends."""

_MAGIC: Final = b"\x89CTXREC"
"""How a recording begins."""


class Trace:
    """A recording that was read. UsageError: there is none, or nothing of it can be read."""

    def __init__(self, path: Path) -> None:
        try:
            self.recording = _Recording(path)
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from None

    def info(self) -> _RecordedInfo:
        """What its requests did. UsageError: a file cannot be read any more, was changed, or is beyond reason."""
        info = self.recording.info()
        try:
            while info.read():
                pass
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from None
        return info

    def parts(self, to: str) -> Iterator[bytes]:
        """A file for another tool. UsageError: as of ``info``."""
        exported = self.recording.export(to, [f"blocks up to {size_text(1 << log)}" for log in range(65)])
        packed = None
        if to == "pprof":
            import zlib  # noqa: PLC0415 - as in _flame

            packed = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        while True:
            try:
                part = next(exported, None)
            except (OSError, ValueError) as error:
                raise UsageError(str(error)) from None
            if part is None:
                break
            yield part if packed is None else packed.compress(part)
        if packed is not None:
            yield packed.flush()


class _Rows(Sequence[tuple[str, ...]]):
    """The rows of the table: each is made when it is asked for."""

    def __init__(self, info: _RecordedInfo, order: Sequence[int]) -> None:
        self._info = info
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, at: int) -> tuple[str, ...]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[str, ...]]: ...
    def __getitem__(self, at: int | slice) -> tuple[str, ...] | Sequence[tuple[str, ...]]:
        if isinstance(at, slice):
            return _Rows(self._info, self._order[at])
        return _row(self._info.row(self._order[at]))


def _quantiles(found: tuple[int, ...] | None, unit: float = 0) -> dict[str, float] | None:
    if found is None:
        return None
    names = ("p50", "p95", "p99", "max")
    return {name: value / unit if unit else value for name, value in zip(names, found, strict=True)}


def _known(row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON."""
    return {
        "name": row["name"],
        "requests": row["requests"],
        "ended": row["ended"],
        "handlers": row["handlers"],
        "peak_bytes": _quantiles(row["peak_bytes"]),
        "seconds": _quantiles(row["nanoseconds"], 1e9),
        **{
            name: row[name]
            for name in (
                "blocks",
                "total_bytes",
                "zeroed_blocks",
                "resizes",
                "moved",
                "refused",
                "refused_allocations",
                "with_others",
                "escaped_blocks",
                "escaped_bytes",
                "freed_on_other_threads",
            )
        },
        "lifetime_seconds": _quantiles(row["lifetime_nanoseconds"], 1e9),
        "sizes": [{"up_to_bytes": 1 << log, "blocks": blocks} for log, blocks in row["classes"].items()],
    }


def _seconds_text(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


class Header(NamedTuple):
    """What the recording says of itself, as ``recording::Header`` in Rust."""

    version: str
    system: str
    page_bytes: int
    cores: int
    began_unix_ns: int
    one_in: int
    highest_one_in: int
    share: float
    processes: int
    file_bytes: int
    other_requests: int
    missing_requests: int


def header_of(recording: _Recording) -> Header:
    """The header, by names."""
    return Header(*recording.header)


def print_info(path: Path, out: TextIO, *, is_json: bool) -> None:
    """What the recording has, by name of request."""
    trace = Trace(path)
    recording = trace.recording
    info = trace.info()
    totals = info.total_bytes()
    order = sorted(range(len(totals)), key=lambda at: -totals[at])
    events, span_ns = info.events, info.span_ns
    header = header_of(recording)
    if is_json:
        known = {
            **header._asdict(),
            "events": events,
            "seconds": span_ns / 1e9,
            "is_cut_off": recording.is_cut_off,
            "skipped_events": recording.skipped,
            "gaps": _gaps.as_json(recording.gaps),
        }
        _print_json(known, (_known(info.row(at)) for at in order), out)
        return
    requests = with_others = 0
    sizes: Counter[int] = Counter()
    for at in order:
        row = info.row(at)
        requests += row["requests"]
        with_others += row["with_others"]
        sizes.update(row["classes"])
    print(
        f"{printable(str(path))}: {counted(requests, 'request')}, "
        f"{counted(events, 'event')} in {span_ns / 1e9:.3g} s, {size_text(header.file_bytes)}, "
        f"{counted(header.processes, 'process', 'es')}",
        file=out,
    )
    rate = f"1 request in {header.one_in}"
    if header.highest_one_in != header.one_in:
        rate += f", at times 1 in {header.highest_one_in}"
    if header.version:
        by = f"by ctxalloc {shortened(header.version)} on {shortened(header.system)}"
        print(f"  recorded {rate}, {by}, {header.cores} processors", file=out)
    for text in _gaps.texts_of(recording.gaps):
        print(f"  {text}", file=out)
    if recording.is_cut_off:
        print(
            "  its end is missing: a process was ended by a signal, still records, or could not write to the file",
            file=out,
        )
    if header.other_requests:
        said = f"{counted(header.other_requests, 'request')} called (other), or with a handler that is"
        print(f"  {said}: names take a quarter of a file at most, and 4096 are told apart", file=out)
    if header.missing_requests:
        said = f"{counted(header.missing_requests, 'recorded request')} missing"
        print(f"  {said}: they began in a file that is there no more, in a gap, or were not written", file=out)
    if recording.skipped:
        said = f"{counted(recording.skipped, 'event')} left out"
        print(f"  {said}: what they belong to began in a file that is there no more, or in a gap", file=out)
    if not requests and not recording.gaps:
        print(f"  it has no request; {_gaps.RECORD_SOME}", file=out)
        return
    heads = ("requests", "count", "peak p50", "p95", "max", "escaped", "own blocks", "own bytes", "lifetime p50")
    table("by name", (*heads, "refused"), _Rows(info, order), out)
    print(
        "  peak and escaped: with what requests inside made; refused: by the limits of these requests",
        file=out,
    )
    if with_others:
        said = f"{counted(with_others, 'request')} whose budget others were charged to"
        print(f"  {said}: peaks include that, and escapes do not", file=out)
    table(
        "blocks by size",
        ("up to", "blocks"),
        [(size_text(1 << log), str(sizes[log])) for log in sorted(sizes)],
        out,
    )


def _print_json(known: dict[str, Any], requests: Iterator[dict[str, Any]], out: TextIO) -> None:
    """As ``json.dumps`` would with a list of the requests, of which there is one at a time here."""
    print(json.dumps(known, indent=2)[: -len("\n}")], end=',\n  "requests": [', file=out)
    before = "\n"
    for request in requests:
        print(before + textwrap.indent(json.dumps(request, indent=2), "    "), end="", file=out)
        before = ",\n"
    print("]\n}" if before == "\n" else "\n  ]\n}", file=out)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    peaks, lifetimes = row["peak_bytes"], row["lifetime_nanoseconds"]
    peak = ("", "", "") if peaks is None else tuple(size_text(peaks[at]) for at in (0, 1, 3))
    return (
        shortened(row["name"]),
        str(row["requests"]),
        *peak,
        size_text(row["escaped_bytes"]),
        str(row["blocks"]),
        size_text(row["total_bytes"]),
        "" if lifetimes is None else _seconds_text(lifetimes[0] / 1e9),
        str(row["refused"]),
    )


def export(path: Path, to: str, output: Path | None, out: TextIO) -> None:
    """Writes the recording in another format, and prints where. UsageError: it cannot be read or written."""
    trace = Trace(path)
    _gaps.warn("trace", trace.recording.gaps)
    where = output or path.with_name(path.name + SUFFIXES[to])
    check_output(where)
    target = None
    try:
        target = _files.target_of(where)
        target.write_parts(trace.parts(to))
    except OSError as error:
        if target is not None and target.is_standard_output:
            raise  # as where anything else is printed
        raise UsageError(f"{where}: {error.strerror}") from None
    if not target.is_standard_output:
        print(where, file=out)


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
