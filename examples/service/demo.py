"""``make demo-handlers``: start the service, post it pictures, check every array and every answer, show it.

Then the control: the same service with a switcher that knows no contexts, to show that the check can fail. Exit status
0: no mismatch and no failed request (and the control had some); 1: otherwise; 2: a command line that names
what does not exist; 130: Ctrl-C. Neighbours: everything beside it.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

import ctxalloc

from . import figure, report
from .app import Switcher
from .audit import Audit
from .client import Sample, drive, jobs
from .launch import LaunchError, launched
from .pictures import pictures
from .progress import Progress
from .reference import Wanted, reference
from .report import Outcome
from .routes import RouteError, Table, add_options, from_options

MAX_SECONDS = 300
_DESCRIPTION = "Start the picture service, post it pictures, and check whose memory every array is in."


def main() -> int:
    """The exit status."""
    options = _options()
    try:
        table = from_options(options)
    except RouteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return asyncio.run(demo(table, options))
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except TimeoutError:
        print(f"error: the demo took longer than {MAX_SECONDS} s; post less: --rounds 1", file=sys.stderr)
        return 1
    except (LaunchError, httpx.HTTPError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def demo(table: Table, options: argparse.Namespace) -> int:
    """All of it, in order."""
    async with asyncio.timeout(MAX_SECONDS):
        print(f"ctxalloc {ctxalloc.__version__}, handlers: {', '.join(h.name for h in ctxalloc.handlers())}\n")
        options.out.mkdir(parents=True, exist_ok=True)
        posted = pictures()
        wanted = await reference(posted)
        outcome = await run(table, "ctxalloc", posted, wanted, rounds=options.rounds, clients=options.clients)
        show("each route under its own handler", outcome)
        control = None
        if options.control:
            control = await run(table, "shared-stack", posted, wanted, rounds=1, clients=options.clients)
            show(
                "control: the same service, handlers switched on one stack for the process (wrong on purpose)", control
            )
    path = options.out / "demo.png"
    figure.draw(path, outcome, control, posted, wanted)
    print(f"drawn: {path}")
    return verdict(outcome, control)


async def run(
    table: Table, switcher: Switcher, posted: Mapping[str, bytes], wanted: Wanted, *, rounds: int, clients: int
) -> Outcome:
    """Start a service, drive it, ask it for its audit, stop it."""
    todo = jobs(tuple(table.handlers), tuple(posted), rounds=rounds)
    progress = Progress(f"{switcher:12}", len(todo))

    def done(sample: Sample) -> None:
        progress.advance(failed=sample.failure is not None)

    limits = httpx.Limits(max_connections=clients)
    async with (
        launched(table, switcher) as address,
        httpx.AsyncClient(base_url=address, timeout=60, limits=limits, trust_env=False) as http,
    ):
        began = time.perf_counter()
        samples = await drive(http, todo, posted, wanted, clients=clients, done=done)
        seconds = time.perf_counter() - began
        progress.close()
        audit = Audit.from_json((await http.get("/audit")).raise_for_status().json())
    return Outcome(table, samples, audit, clients, seconds)


def show(title: str, outcome: Outcome) -> None:
    """On standard output."""
    print(f"\n{title}\n\n{report.text(outcome)}\n\n{report.sentence(outcome)}\n")
    for sample in outcome.failures[:5]:
        print(f"failed: {sample.job.route} with {sample.job.picture}: {sample.failure}")


def verdict(outcome: Outcome, control: Outcome | None) -> int:
    """What it all means, in a line, and the exit status."""
    if outcome.audit.mismatches or outcome.failures:
        print(f"FAILED: {outcome.audit.mismatches} mismatches, {len(outcome.failures)} failed requests")
        return 1
    if not outcome.audit.interleaved:
        print("FAILED: requests with different handlers never met, so nothing was shown; try more --clients")
        return 1
    if control is not None and not control.audit.mismatches:
        print("FAILED: the control had no mismatch, so nothing was shown; try more --clients")
        return 1
    print("ok: every array was made by the handler asked for")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.service", description=_DESCRIPTION)
    add_options(parser)
    parser.add_argument("--rounds", type=_count, default=6, help="of each picture to each route (%(default)s)")
    parser.add_argument("--clients", type=_count, default=12, help="requests at once (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("target/demo"), help="folder of the drawing (%(default)s)")
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=True, help="run the control too")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
