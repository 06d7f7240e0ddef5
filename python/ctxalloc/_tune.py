"""The commands ``replay`` and ``recommend`` of ``_command``: their options, and what they run."""

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TextIO

from ctxalloc import _files, _recommend, _replay, _replay_command
from ctxalloc._ending import ENDING, StoppedError
from ctxalloc._program import UsageError
from ctxalloc._text import says

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
        command = commands.add_parser(name, **says(said))
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
        else:
            command.add_argument(
                "--output",
                metavar="FILE",
                type=_files.named,
                help="write a page, a .html; -: to stdout, in place of the text",
            )


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Runs one of the two; its exit status. UsageError: it cannot be done."""
    path: Path = options.recording
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no recording {os.fspath(path)!r}") from None
    except OSError as error:
        raise UsageError(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from None
    try:
        with ENDING.handled():
            return _run(options, path, out)
    except (StoppedError, KeyboardInterrupt):
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace, path: Path, out: TextIO) -> int:
    if options.command == "recommend":
        return _recommend.recommend(
            path,
            options.strategy,
            options.rounds,
            only=options.route,
            is_json=options.json,
            output=options.output,
            out=out,
        )
    return _replay_command.replay(
        path,
        options.strategy,
        options.rounds,
        route=options.route,
        on_one_thread=options.one_thread,
        is_json=options.json,
        out=out,
    )
