"""One replay, in a process of its own, which ``_replay`` starts: ``python -m ctxalloc._replay_one STRATEGY PLAN``.

It reads the strategies of single routes, as JSON, and writes the replay's numbers. It imports nothing else of the
package: that would take longer than most replays.
"""

import json
import sys

from ctxalloc import _native


def main(strategy: str, plan: str) -> int:
    """The exit status."""
    try:
        numbers = _native._replay(plan, strategy, by_route=json.load(sys.stdin))  # noqa: SLF001 - for this
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    json.dump(numbers, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
