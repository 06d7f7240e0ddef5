"""The language of programs: its words, its text form, and what may stand where.

A program is a tree in which every node runs at most once, so a node's place in preorder names a step of the trace.
`inside` and `allowed` are the only knowledge of what may stand where: the generator and the shrinker both use them.
The Rust interpreter reads the same text (interpreter/program.rs). README.md says what each word means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

HANDLERS: Final = 5
"""Handlers that programs choose from: 0 is the default one, the rest are registered by both sides."""


@dataclass(frozen=True, slots=True)
class Node:
    """One step: a word, numbers (handlers, labels, flavours) and the bodies that it runs."""

    word: str
    numbers: tuple[int, ...] = ()
    bodies: tuple[Body, ...] = ()


Body = tuple[Node, ...]


class Shape(NamedTuple):
    """What a word's numbers are called (a last `*name` takes the rest), and its bodies."""

    numbers: tuple[str, ...] = ()
    bodies: tuple[str, ...] = ()


WORDS: Final[dict[str, Shape]] = {
    "main": Shape(("threads_inherit",), ("body",)),
    # the selection of the running context
    "look": Shape(("flavour",)),
    "set": Shape(("token", "handler")),
    "reset": Shape(("token",)),
    "enter": Shape(("hold", "handler")),
    "leave": Shape(("hold",)),
    "with": Shape(("flavour", "handler"), ("body",)),
    # ways out of a body
    "try": Shape((), ("body", "cleanup")),
    "catch": Shape((), ("body",)),
    "raise": Shape(),
    # contexts as values
    "copy": Shape(("context",)),
    "fresh": Shape(("context",)),
    "clone": Shape(("context", "of")),
    "peek": Shape(("context",)),
    "run": Shape(("context",), ("body",)),
    # lines of execution, and how they wait for each other
    "spawn": Shape(("child", "kind", "with", "*gives"), ("body", "ending")),
    "thread": Shape(("child", "kind", "with", "*gives"), ("body",)),
    "job": Shape(("child", "kind", "with", "*gives"), ("body",)),
    "work": Shape(("worker", "kind", "with", "*gives"), ("body",)),
    "join": Shape(("child",)),
    "gate": Shape(),
    "open": Shape(("child",)),
    "cancel": Shape(("child", "flavour")),
    "yield": Shape(),
    "loop": Shape((), ("body",)),
    # futures driven by hand, futures that share a context, futures that have one of their own
    "scoped": Shape(("flavour", "with"), ("body", "ending")),
    "drive": Shape(("flavour",), ("body",)),
    "hop": Shape(("polls", "elsewhere", "handler"), ("body",)),
    "both": Shape((), ("first", "second")),
    "race": Shape((), ("first", "second")),
    "stream": Shape(("handler",), ("producer", "cleanup", "consumer")),
    "emit": Shape(),
    "next": Shape(),
}

# `kind` of spawn, thread, job and work, and `flavour` of scoped.
CARRYING: Final = 0
PLAIN: Final = 1
IN_CONTEXT: Final = 2
"""Runs in the context with the label `with`, and uses it up."""
WITH_HANDLER: Final = 3
"""Runs in a copy of the current context in which the handler `with` is selected."""
CARRYING_TOO: Final = 4
"""The same as CARRYING by the API's other way: JoinSet, Builder + wrap, ..."""


@dataclass(frozen=True, slots=True)
class Place:
    """What may stand in a body. One Place holds for all nodes of a body."""

    awaits: Literal["all", "yields", "none"] = "all"
    """`yields`: only `yield` suspends, so the body can be stepped by hand. `none`: a synchronous function."""
    loop: bool = True
    """An event loop runs on this thread: tasks and jobs can be started."""
    blocks: bool = False
    """A thread of its own, which may wait by blocking and may run an event loop."""
    gates: bool = False
    """A task that its parent may cancel at a gate."""
    ambient: bool = False
    """Runs in a context that it shares with unknown others: it must leave it as it was at every suspension."""
    cleanup: bool = False
    """Runs in a destructor, perhaps while an exception is on its way: it must not raise."""
    holds: bool = True
    """On the line's own thread: a `Guard` of Rust's stays on the thread that made it."""
    emits: bool = False
    nexts: bool = False


MAIN: Final = Place()


def allowed(word: str, place: Place) -> bool:
    """Whether a node with this word may stand there."""
    match word:
        case "set" | "reset":
            return not place.ambient
        case "enter" | "leave":
            return place.holds and not place.ambient
        case "raise":
            return not place.cleanup
        case "yield" | "both" | "race" | "scoped":
            return place.awaits != "none"
        case "gate":
            return place.gates
        case "open" | "cancel":
            return place.awaits == "all"
        case "stream":
            return place.awaits == "all" and not place.ambient
        case "join" | "work":
            return place.awaits == "all" or (place.blocks and place.awaits == "none")
        case "spawn" | "job":
            return place.loop
        case "loop":
            return place.blocks and not place.cleanup
        case "emit":
            return place.emits
        case "next":
            return place.nexts
        case "main":
            return False
        case _:
            return True


def inside(node: Node, index: int, place: Place) -> Place:
    """What may stand in that body of a node which stands in `place`."""
    here = replace(place, emits=False, nexts=False)
    match node.word, WORDS[node.word].bodies[index]:
        case "spawn", "ending":
            return Place(awaits="none", cleanup=True, ambient=node.numbers[1] == PLAIN)
        case _, "cleanup" | "ending":
            ambient = here.ambient and node.word == "try"  # the others have a context of their own
            return replace(here, awaits="none", gates=False, cleanup=True, blocks=False, ambient=ambient)
        case "main", _:
            return MAIN
        case "with", _:
            inner = replace(here, nexts=place.nexts)
            # Between its suspensions a shared context must be as it was.
            return replace(inner, awaits="none", gates=False, nexts=False) if place.ambient else inner
        case (("try" | "catch"), _):
            return replace(here, nexts=place.nexts)
        case "run", _:
            return replace(here, awaits="none", gates=False, ambient=False)
        case "spawn", _:
            return Place(gates=True, ambient=node.numbers[1] == PLAIN)
        case "job", _:
            return Place(awaits="none", loop=False, blocks=True, ambient=node.numbers[1] == PLAIN)
        case (("thread" | "work"), _):
            return Place(awaits="none", loop=False, blocks=True)
        case "loop", _:
            return Place()
        case "scoped", _:
            return replace(here, ambient=False, blocks=False)
        case (("drive" | "both" | "race"), _):
            return replace(here, awaits="yields", gates=False, blocks=False)
        case "hop", _:
            stays = not node.numbers[1]  # other threads have no loop
            inner = replace(here, awaits="yields", gates=False, blocks=False, ambient=False)
            return replace(inner, loop=here.loop and stays, holds=here.holds and stays)
        case "stream", "producer":
            return replace(here, awaits="yields", gates=False, blocks=False, ambient=False, emits=True)
        case "stream", _:
            return replace(here, nexts=True)
        case _:
            raise AssertionError(f"{node.word} has no body {index}")


def valid(node: Node, place: Place | None = None) -> bool:
    """Whether every node of a program stands where it may."""
    if place is None:
        if node.word != "main":
            return False
    elif not allowed(node.word, place):
        return False
    return all(
        valid(child, inside(node, index, place or MAIN)) for index, body in enumerate(node.bodies) for child in body
    )


def walk(node: Node) -> Iterator[Node]:
    """All nodes in preorder."""
    yield node
    for body in node.bodies:
        for child in body:
            yield from walk(child)


def dump(node: Node) -> str:
    """One line of text: `(with 0 2 [(look 0) (yield)])`."""
    parts = [node.word, *map(str, node.numbers)]
    parts += ["[" + " ".join(map(dump, body)) + "]" for body in node.bodies]
    return "(" + " ".join(parts) + ")"


def parse(text: str) -> Node:
    """The program that `dump` wrote."""
    tokens = re.findall(r"[()\[\]]|[^\s()\[\]]+", text)
    at = 0

    def node() -> Node:
        nonlocal at
        if tokens[at] != "(":
            raise ValueError(f"a node begins with '(', not with {tokens[at]!r} (token {at} of the program)")
        word = tokens[at + 1]
        if word not in WORDS:
            raise ValueError(f"{word!r} is no word of the language; it has: {' '.join(WORDS)}")
        at += 2
        numbers: list[int] = []
        while tokens[at] not in "()[]":
            numbers.append(int(tokens[at]))
            at += 1
        bodies: list[Body] = []
        while tokens[at] == "[":
            at += 1
            body: list[Node] = []
            while tokens[at] != "]":
                body.append(node())
            at += 1
            bodies.append(tuple(body))
        if tokens[at] != ")":
            raise ValueError(f"a node ends with ')', not with {tokens[at]!r} (token {at} of the program)")
        at += 1
        return Node(word, tuple(numbers), tuple(bodies))

    return node()


def describe(node: Node) -> str:
    """A node without its bodies, for people: `with flavour=0 handler=2`."""
    names = WORDS[node.word].numbers
    parts = [node.word]
    for index, name in enumerate(names):
        if name.startswith("*"):
            rest = node.numbers[index:]
            parts += [f"{name[1:]}={','.join(map(str, rest))}"] if rest else []
        else:
            parts.append(f"{name}={node.numbers[index]}")
    return " ".join(parts)
