"""The commands ``replay`` and ``recommend`` of ``_command``: their options, and what they run."""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ctxalloc import _recommend, _replay
from ctxalloc._program import UsageError

COMMANDS: Final = ("replay", "recommend")


def _strategies(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no strategy; give some: {','.join(_replay.STRATEGIES)}")
    return names


def add_to(commands: Any, rounds: Callable[[str], int]) -> None:
    """Adds both to the command line's parser."""
    for name, said in (
        ("replay", "what a recording takes under each strategy"),
        ("recommend", "what each route of a recording should get, and why"),
    ):
        command = commands.add_parser(name, help=said)
        command.add_argument("recording", type=Path, metavar="FILE", help="what was recorded")
        command.add_argument(
            "--strategy",
            metavar="NAMES",
            type=_strategies,
            default=list(_replay.STRATEGIES),
            help=f"which, separated by commas (default: {','.join(_replay.STRATEGIES)})",
        )
        command.add_argument("--rounds", metavar="N", type=rounds, default=5, help="how often each (default: 5)")
        command.add_argument("--route", metavar="NAME", help="requests of this name only")
        command.add_argument("--json", action="store_true", help="print it for programs")
        if name == "replay":
            command.add_argument(
                "--one-thread",
                action="store_true",
                help="all on one thread, in the recorded order: the same steps at each round",
            )
            command.add_argument("--one", help=argparse.SUPPRESS)
        else:
            command.add_argument("--output", metavar="FILE", type=Path, help="write a page, a .html")


def run(options: argparse.Namespace) -> int:
    """Runs one of the two; its exit status."""
    out = io.StringIO() if sys.stdout is None else sys.stdout  # it is closed: nobody reads
    path: Path = options.recording
    if not path.exists():
        print(f"ctxalloc {options.command}: there is no recording {os.fspath(path)!r}", file=sys.stderr)
        return 2
    try:
        if options.command == "recommend":
            status = _recommend.recommend(
                path,
                options.strategy,
                options.rounds,
                only=options.route,
                is_json=options.json,
                output=options.output,
                out=out,
            )
        elif options.one is not None:
            _replay.one(path, options.one, json.load(sys.stdin), on_one_thread=options.one_thread, out=out)
            status = 0
        else:
            status = _replay.replay(
                path,
                options.strategy,
                options.rounds,
                route=options.route,
                on_one_thread=options.one_thread,
                is_json=options.json,
                out=out,
            )
        out.flush()
    except (UsageError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # whoever reads it has read enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"ctxalloc {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status
