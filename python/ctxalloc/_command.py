"""The command line: ``python -m ctxalloc``, or ``ctxalloc``.

``run`` runs a script or a module as ``python`` does, under a handler, with a limit, and tells what its arrays took;
``info`` tells what this machine offers.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ctxalloc import _compare, _files, _flame, _info, _report, _run, _starting, _trace, _tune, _whole
from ctxalloc._native import __version__
from ctxalloc._program import Program, RefusedError, UsageError
from ctxalloc._text import says, size_of

_RUN = """\
Runs a script, a module (-m) or some code (-c) as `python` does, without a change of a line.

examples:
  ctxalloc run --report script.py --its-own-option
  ctxalloc run --handler pool --limit 2GiB script.py
  ctxalloc run --handler pool --compare -m package.module
  ctxalloc run --report -c "import numpy; numpy.ones((1000, 1000))"
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


def _sites(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of sites; give one from 1 to 1000000")
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
        usage="ctxalloc run [options] script.py [arguments]\n       ctxalloc run [options] -m module [arguments]\n"
        "       ctxalloc run [options] -c code [arguments]",
    )
    run.add_argument("--handler", metavar="NAME", help="select this handler, in threads too: pool, hugepages, ...")
    run.add_argument(
        "--limit",
        metavar="SIZE",
        type=_size,
        help="the most bytes of arrays at one time: 2GiB, 500MB; more is MemoryError",
    )
    run.add_argument(
        "--report",
        action="store_true",
        help="print what the arrays took to standard error at the end; --report=json for programs; --report=FILE by "
        "stack: a flame graph in a .html, folded stacks in a .folded, pprof in a .pb.gz",
    )
    run.add_argument("--kind", help=argparse.SUPPRESS)
    run.add_argument("--output", metavar="FILE", type=_files.named, help="write the report to this file; - is stdout")
    run.add_argument(
        "--compare",
        action="store_true",
        help="run it with NumPy's default and with --handler in turn; print both",
    )
    run.add_argument(
        "--record",
        metavar="FILE",
        type=Path,
        help="record what its requests ask of memory, for ctxalloc trace; the program itself is one",
    )
    run.add_argument("--sites", metavar="N", type=_sites, help="how many sites --report shows (default: 10)")
    run.add_argument("--rounds", metavar="N", type=_rounds, help="how often --compare runs each (default: 3)")
    run.add_argument("-m", dest="is_module", action="store_true", help="the program is a module")
    run.add_argument("-c", dest="code", metavar="CODE", help="the program is this text")
    run.add_argument("--code", help=argparse.SUPPRESS)
    run.add_argument("program", help="the script, or with -m the module")
    arguments = run.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
    arguments.required = False  # for the message where there is no program
    run.add_argument(
        "--whole",
        action="store_true",
        help="count and limit native memory and Python objects beside arrays",
    )
    commands.add_parser("whole", **says("print the library for LD_PRELOAD that request(whole=True) needs"))
    compare = commands.add_parser("compare", **says("what differs between two reports of run --report=json"))
    compare.add_argument("before", type=Path, help="the report of one run")
    compare.add_argument("after", type=Path, help="the report of another one")
    compare.add_argument("--sites", metavar="N", type=_sites, default=10, help="how many functions (default: 10)")
    trace = commands.add_parser("trace", **says("what a recording of run --record or CTXALLOC_RECORD says"))
    traces = trace.add_subparsers(dest="trace", required=True, metavar="what")
    told = traces.add_parser("info", **says("its requests by name: peaks, sizes, lifetimes, escapes"))
    told.add_argument("--json", action="store_true", help="print it for programs")
    told.add_argument("recording", type=Path, help="the file; those beside it are read with it")
    exported = traces.add_parser("export", **says("write it for another tool"))
    exported.add_argument(
        "--to",
        choices=list(_trace.SUFFIXES),
        required=True,
        help="the log that RMM's REPLAY_BENCHMARK replays; pprof; the JSON that ui.perfetto.dev opens",
    )
    exported.add_argument(
        "--output", metavar="FILE", type=_files.named, help="where; by default beside the recording; - is stdout"
    )
    exported.add_argument("recording", type=Path, help="the file; those beside it are read with it")
    info = commands.add_parser("info", **says("what this machine and this Python offer, and what to change"))
    info.add_argument("--json", action="store_true", help="print it for programs")
    _tune.add_to(commands, _rounds)
    return parser


def _separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """``--report=json`` and ``-c code`` as argparse can read them: with values that are never anything else.

    Apart from these what a program is given, of which argparse would take a ``--``.
    """
    words: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if words and (
            word == "-" or not word.startswith("-")
        ):  # the program, behind the command: what follows is its own
            words.append(word)
            break
        if words[:1] == ["run"] and word.startswith("-c"):
            code = word[2:] or next(rest, None)
            words += [word] if code is None else [f"--code={code}", "-"]
            break
        if word.startswith("--report="):
            words += ["--report", f"--kind={word.removeprefix('--report=')}"]
            continue
        words.append(word)
        if word in _WITH_VALUE:
            words += [value for value in [next(rest, None)] if value is not None]
    return (words, [*rest]) if words[:1] == ["run"] else ([*words, *rest], [])


_WITH_VALUE: Final = frozenset({"--handler", "--limit", "--output", "--record", "--rounds", "--sites"})


def _printed(options: argparse.Namespace) -> int:
    """A command that prints something and no more; its exit status."""
    out = io.StringIO() if sys.stdout is None else sys.stdout  # it is closed: nobody reads
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # names are a program's own, and it may be of ASCII only
    status = 0
    try:
        _starting.is_over()
        if options.command in _tune.COMMANDS:
            status = _tune.run(options, out)
        elif options.command == "compare":
            _report.compare(options.before, options.after, options.sites, out)
        elif options.command == "info":
            _info.print_info(out, is_json=options.json)
        elif options.command == "trace" and options.trace == "info":
            _trace.print_info(options.recording, out, is_json=options.json)
        elif options.command == "trace":
            _trace.export(options.recording, options.to, options.output, out)
        else:
            print(_whole.library(), file=out)
        out.flush()
    except UsageError as error:
        print(f"ctxalloc {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        # What is left in the stream would fail again as the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # else whoever reads it has read enough, as `head` does
            print(f"ctxalloc {options.command}: standard output: {error.strerror}", file=sys.stderr)
            return 1
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status."""
    parser = _parser()
    words, its_own = _separated(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    options.arguments = its_own
    if options.command != "run":
        return _printed(options)
    is_by_stack = options.kind is not None and _flame.has_format(Path(options.kind))
    for given, other, is_wrong in (
        ("--rounds", "goes with --compare only", options.rounds is not None and not options.compare),
        (
            f"--report={options.kind}",
            "is no kind of report; give --report, --report=json or --report=FILE, a .html, .folded or .pb.gz",
            options.kind not in (None, "json") and not is_by_stack,
        ),
        (
            "--output",
            "does not go with --report=FILE, which names the file",
            options.output is not None and is_by_stack,
        ),
        ("--sites", "does not go with --report=FILE, which has all", options.sites is not None and is_by_stack),
        ("--output", "goes with --report only", options.output is not None and not options.report),
        ("--sites", "goes with --report only", options.sites is not None and not options.report),
        ("--record", "does not go with --compare: run it alone", options.record is not None and options.compare),
        ("--report", "does not go with --compare: run it once with each", options.report and options.compare),
    ):
        if is_wrong:
            print(f"ctxalloc run: {given} {other}", file=sys.stderr)
            return 2
    if options.code is not None:
        program = Program("-c", is_module=False, arguments=options.arguments, code=options.code)
    else:
        program = Program(options.program, options.is_module, options.arguments)
    try:
        if options.whole:
            _whole.prepare(list(sys.argv[1:] if arguments is None else arguments), compares=options.compare)
        if options.compare:
            _starting.is_over()
            return _compare.compare(program, options.handler or "pool", options.limit, options.rounds or 3, sys.stderr)
        wanted = None
        if options.report:
            path = Path(options.kind) if is_by_stack else options.output
            wanted = _run.Wanted(options.kind == "json", path, options.sites or 10, is_by_stack)
        return _run.run(
            program, options.handler, options.limit, report=wanted, whole=options.whole, record=options.record
        )
    except RefusedError as refused:
        print(refused, file=sys.stderr)
        return refused.status
    except UsageError as error:
        print(f"ctxalloc run: {error}", file=sys.stderr)
        return 2
