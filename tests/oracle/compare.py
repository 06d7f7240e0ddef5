"""Runs programs on all sides and says where they differ; makes a program that differs small and readable."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Self

from cpython import THREADS_INHERIT, Interpreter
from generate import Generator
from language import WORDS, Body, Node, describe, valid, walk
from rust import RustSide
from selection import Selection

HANG_SECONDS: Final = 120.0
"""No chunk of programs takes so long."""
NO_ANSWER: Final = ""
"""Instead of a trace: the side crashed."""
Traces = dict[str, str]
"""By side: `contextvars`, `numpy`, `current`, `multi`, `local`."""


@dataclass(slots=True)
class Difference:
    """A program on which sides differ."""

    program: Node
    traces: Traces
    seed: str = ""
    number: int = -1


@dataclass(slots=True)
class Tally:
    """What was run."""

    programs: int = 0
    steps: int = 0
    """Steps that ran, on one side."""
    suspended: int = 0
    migrated: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.programs += other.programs
        self.steps += other.steps
        self.suspended += other.suspended
        self.migrated += other.migrated
        self.differences += other.differences


class Watchdog:
    """Ends the process where a program hangs, after saying which: a hang is no trace, so it cannot be compared."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.what = ""
        self.timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        self.timer = threading.Timer(self.limit_seconds, self.bark)
        self.timer.daemon = True
        self.timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def bark(self) -> None:
        print(f"oracle: HANG: nothing came back for {self.limit_seconds:.0f} s from {self.what}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)


class Comparer:
    """All sides, for program after program."""

    def __init__(
        self, selections: Sequence[Selection], rust: RustSide | None, hang_seconds: float = HANG_SECONDS
    ) -> None:
        self.selections = selections
        self.rust = rust
        self.interpreter = Interpreter()
        self.watchdog = Watchdog(hang_seconds)

    def close(self) -> None:
        self.interpreter.close()
        if self.rust is not None:
            self.rust.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def compare(self, programs: Sequence[Node], name: str = "a program") -> Iterator[Traces]:
        """The traces of programs, in their order."""
        with self.watchdog:
            if self.rust is not None:
                self.rust.send(programs)
            all_traces: list[Traces] = []
            for number, program in enumerate(programs):
                self.watchdog.what = f"CPython, {name} {number}"
                all_traces.append({selection.name: self._run(program, selection) for selection in self.selections})
        number = 0
        while number < len(programs):
            with self.watchdog:
                self.watchdog.what = f"Rust, {name} {number}"
                for answer in self._rust_answers(len(programs) - number):
                    yield all_traces[number] | answer
                    number += 1
                    self.watchdog.what = f"Rust, {name} {number}"
            if number < len(programs):  # it crashed: this program has no answer, the next ones are sent again
                assert self.rust is not None
                yield all_traces[number] | dict.fromkeys(self.rust.runtimes, NO_ANSWER)
                number += 1
                self.rust.send(programs[number:])

    def _run(self, program: Node, selection: Selection) -> str:
        """CPython's trace, or none where something raised what no program raises."""
        try:
            return self.interpreter.run(program, selection)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            self.interpreter.close()  # it may still run parts of the program
            self.interpreter = Interpreter()
            return NO_ANSWER

    def _rust_answers(self, count: int) -> Iterator[Traces]:
        return iter([{}] * count) if self.rust is None else self.rust.answers(count)

    def run(self, seed: str, numbers: range) -> Tally:
        """Compares those programs of a seed."""
        tally = Tally()
        programs = [generated(seed, number) for number in numbers]
        name = f"seed {seed} from program {numbers.start} on, program"
        for number, program, traces in zip(numbers, programs, self.compare(programs, name), strict=True):
            tally.programs += 1
            tally.steps += sum(entry[2:] != "--" for entry in pairs(next(iter(traces.values()))))
            if differ(traces):
                tally.differences.append(Difference(program, traces, seed, number))
        return tally

    def shrink(self, found: Difference, most_runs: int = 3000) -> Difference:
        """A smaller program on which sides still differ. Every step of it is needed."""
        best = found
        repeats = self._repeats(found.program)
        runs = 0

        def differing(program: Node) -> Traces | None:
            nonlocal runs
            runs += 1
            if not valid(program):
                return None
            return next(filter(differ, self.compare([program] * repeats)), None)

        smaller = True
        while smaller and runs < most_runs:
            smaller = False
            for candidate in candidates(best.program):
                traces = differing(candidate)
                if traces is not None:
                    best = replace(best, program=candidate, traces=traces)
                    smaller = True
                    break
                if runs >= most_runs:
                    break
        return best

    def _repeats(self, program: Node) -> int:
        """How often a program must run until it differs: more than once where that depends on scheduling."""
        for repeats in (1, 10, 100):
            if all(any(map(differ, self.compare([program] * repeats))) for _ in range(3)):
                return repeats
        return 300


def generated(seed: str, number: int) -> Node:
    """Program `number` of a seed."""
    return Generator(f"{seed}:{number}").program(threads_inherit=THREADS_INHERIT)


def differ(traces: Traces) -> bool:
    """Whether sides differ, one names what nobody selected, or one crashed: also where all of them did."""
    texts = set(traces.values())
    return len(texts) > 1 or NO_ANSWER in texts or any(mark in text for text in texts for mark in ("!", "X", "9"))


def pairs(trace: str) -> Iterator[str]:
    """A trace's entries by node: four characters each."""
    return (trace[at : at + 4] for at in range(0, len(trace), 4))


def candidates(program: Node) -> Iterator[Node]:
    """Smaller programs: without a node, with its bodies in its place, with one thing less given to its child."""
    nodes = list(walk(program))
    for wanted in range(1, len(nodes)):
        yield rebuilt(program, wanted, lambda _: ())
    for wanted in range(1, len(nodes)):
        yield rebuilt(program, wanted, lambda node: tuple(child for body in node.bodies for child in body))
    for wanted, node in enumerate(nodes):
        names = WORDS[node.word].numbers
        if names and names[-1] == "*gives" and len(node.numbers) >= len(names):
            yield rebuilt(program, wanted, lambda node: (replace(node, numbers=node.numbers[:-1]),))


def rebuilt(program: Node, wanted: int, change: Callable[[Node], Body]) -> Node:
    """The program with `change` made to its node number `wanted` in preorder."""
    number = -1

    def of(node: Node) -> Body:
        nonlocal number
        number += 1
        if number == wanted:
            number += sum(1 for _ in walk(node)) - 1
            return change(node)
        return (replace(node, bodies=tuple(tuple(new for old in body for new in of(old)) for body in node.bodies)),)

    return of(program)[0]


def report(found: Difference) -> str:
    """The program with all traces beside it, for people."""
    sides = list(found.traces)
    columns = [list(pairs(trace)) for trace in found.traces.values()]
    lines = ["  ".join(f"{side:>11}" for side in sides) + "  step"]

    def add(node: Node, depth: int) -> None:
        index = counter[0]
        counter[0] += 1
        entries = [column[index] if index < len(column) else "????" for column in columns]
        mark = "*" if len(set(entries)) > 1 or any(set(entry) & set("!X9") for entry in entries) else " "
        shown = "  ".join(f"{entry[:2]:>8} {entry[2:]}" for entry in entries)
        lines.append(f"{shown} {mark}{'    ' * depth}{describe(node)}")
        names = WORDS[node.word].bodies
        for name, body in zip(names, node.bodies, strict=True):
            if len(names) > 1 and body:
                lines.append(f"{'':{13 * len(sides) - 2}}  {'    ' * depth}  {name}:")
            for child in body:
                add(child, depth + 1)

    counter = [0]
    add(found.program, 0)
    lines += [f"{side} gave no answer: it crashed" for side, trace in found.traces.items() if trace == NO_ANSWER]
    lines += [f"{side} {trace[-6:]}" for side, trace in found.traces.items() if trace.endswith("leaked")]
    return "\n".join(lines)
