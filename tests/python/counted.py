"""What metrics count of a name, in a process whose other tests may have taken all 128 names."""

import ctxalloc


def counted(name: str) -> list[int]:
    """Of this name and of the rest, where it is counted if it has no room: to be compared with what it was before.

    The ended requests; those that waited and got room, that timed out, that were turned away; the peaks, and those of
    refused requests.
    """
    every = ctxalloc.metrics.snapshot().series
    rows = [
        (
            one.requests,
            one.waited_micros.count,
            one.timed_out,
            one.turned_away,
            one.peak_bytes.count,
            one.refused_peak_bytes.count,
        )
        for one in (every.get(name), every.get("other"))
        if one is not None
    ]
    return [sum(column) for column in zip(*rows, strict=True)] or [0] * 6


def since(before: list[int], name: str) -> tuple[int, ...]:
    """What was counted since then."""
    return tuple(now - then for now, then in zip(counted(name), before, strict=True))
