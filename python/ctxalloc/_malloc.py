"""What the recorded program's malloc had learnt: a replay's begins as a new program's.

Each block that glibc mapped and gets back teaches it to keep as much from then on (mallopt(3), M_MMAP_THRESHOLD). So a
program that has run for a while has fewer page faults than a new one, and a pool saves it less, or nothing. A recording
has the page faults of its requests: a replay gets the threshold that gives it no more.
"""

from collections.abc import Callable
from typing import Any, Final

from ctxalloc._advice import as_it_is
from ctxalloc._replay import BASE, Planned, replays

MORE_FAULTS: Final = 1.2
FEW_FAULTS: Final = 1000
"""How many times the page faults of the program, and so many more, make it sure that malloc did not do so there."""

MMAP_THRESHOLDS: Final = tuple(kib << 10 for kib in (256, 1024, 2048, 4096, 8192, 16384, 32768))
"""What malloc may have been taught, in bytes: 32 MiB is the most."""


def mmap_threshold(plan: Planned, facts: dict[str, Any], shown: Callable[[str], None]) -> int | None:
    """Malloc's, in bytes, where it does in a replay as it did in the program. None: a new program's.

    ``facts``: of what is replayed, by ``_native._recorded_routes``. StoppedError; FailedError: a replay failed.
    """
    if not _tells(facts):
        return None

    def has_too_many(threshold: int | None) -> bool:
        [(_, numbers)] = replays(plan, [BASE], 1, mmap_threshold=threshold, shown=shown)
        return _has_too_many(facts, numbers["faults"])

    tried = (None, *MMAP_THRESHOLDS)
    return next((threshold for threshold in tried if not has_too_many(threshold)), tried[-1])


def _tells(facts: dict[str, Any]) -> bool:
    """Whether its page faults are known, and the C heap's."""
    return facts["page_faults"] is not None and as_it_is(facts).strategy == BASE


def _has_too_many(facts: dict[str, Any], faults: int) -> bool:
    """Whether a replay of its arrays alone has more than the whole process had while its requests were open."""
    return bool(faults > MORE_FAULTS * facts["page_faults"] + FEW_FAULTS)
