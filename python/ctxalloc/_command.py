"""The command line: ``python -m ctxalloc``, or ``ctxalloc``.

``run`` runs a script or a module as ``python`` does, under a handler, with a limit, and tells what its arrays took;
``info`` tells what this machine offers.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from ctxalloc import _compare, _info, _run, _whole
from ctxalloc._native import __version__
from ctxalloc._program import Program, UsageError
from ctxalloc._text import size_of

_RUN = """\
Runs a script, or with -m a module, as `python` does, without a change of a line.

examples:
  ctxalloc run --report script.py --its-own-option
  ctxalloc run --handler pool --limit 2GiB script.py
  ctxalloc run --handler pool --compare -m package.module
"""


def _size(text: str) -> int:
    try:
        return size_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds; give one from 1 to 1000")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ctxalloc", description="See, choose and limit the memory of NumPy's arrays.")
    parser.add_argument("--version", action="version", version=f"ctxalloc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="run a program under a handler or a limit, and report its arrays",
        description=_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ctxalloc run [options] script.py [arguments]\n       ctxalloc run [options] -m module [arguments]",
    )
    run.add_argument("--handler", metavar="NAME", help="select this handler, in threads too: pool, hugepages, ...")
    run.add_argument(
        "--limit",
        metavar="SIZE",
        type=_size,
        help="the most bytes of arrays at one time: 2GiB, 500MB; more is MemoryError",
    )
    run.add_argument("--report", action="store_true", help="print what the arrays took to standard error at the end")
    run.add_argument(
        "--compare",
        action="store_true",
        help="run it with NumPy's default and with --handler in turn; print both",
    )
    run.add_argument(
        "--rounds", metavar="N", type=_rounds, default=3, help="how often --compare runs each (default: 3)"
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="the program is a module")
    run.add_argument("program", help="the script, or with -m the module")
    arguments = run.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
    arguments.required = False  # for the message where there is no program
    run.add_argument(
        "--whole",
        action="store_true",
        help="count and limit native memory and Python objects beside arrays",
    )
    commands.add_parser("whole", help="print the library for LD_PRELOAD that request(whole=True) needs")
    commands.add_parser("info", help="what this machine and this Python offer, and what to change")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "whole":
        try:
            print(_whole.library())
        except UsageError as error:
            print(f"ctxalloc whole: {error}", file=sys.stderr)
            return 2
        return 0
    if options.command == "info":
        try:
            _info.print_info(sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads it has read enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    program = Program(options.program, options.is_module, options.arguments)
    try:
        if options.whole:
            _whole.prepare(list(sys.argv[1:] if arguments is None else arguments), compares=options.compare)
        if options.compare:
            return _compare.compare(program, options.handler or "pool", options.limit, options.rounds, sys.stderr)
        return _run.run(
            program, options.handler, options.limit, report=sys.stderr if options.report else None, whole=options.whole
        )
    except UsageError as error:
        print(f"ctxalloc run: {error}", file=sys.stderr)
        return 2
