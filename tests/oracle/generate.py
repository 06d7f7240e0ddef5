"""Random programs. The same seed and number give the same program, on every machine and version."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from language import (
    CARRYING,
    CARRYING_TOO,
    HANDLERS,
    IN_CONTEXT,
    MAIN,
    PLAIN,
    WITH_HANDLER,
    WORDS,
    Body,
    Node,
    Place,
    allowed,
    inside,
)

# How often each word is tried where it may stand. Threads and loops cost most and come least.
WEIGHTS = {
    "look": 4, "set": 16, "reset": 14, "enter": 5, "leave": 6, "with": 10,
    "try": 7, "catch": 4, "raise": 0.6,
    "copy": 4, "fresh": 1, "clone": 3, "peek": 2, "run": 12,
    "spawn": 12, "thread": 1.2, "job": 2, "work": 1.5, "join": 8, "gate": 16, "open": 6, "cancel": 9, "yield": 14,
    "loop": 0.6,
    "scoped": 6, "drive": 2, "hop": 4, "both": 2.5, "race": 2.5, "stream": 2.5, "emit": 20, "next": 20,
}  # fmt: skip
DEEPEST = 7


@dataclass(slots=True)
class Line:
    """What one line of execution probably has at hand; references to what it has not are fine, but dull."""

    tokens: list[int] = field(default_factory=list)
    holds: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    tasks: dict[int, Line] = field(default_factory=dict)
    others: dict[int, Line] = field(default_factory=dict)


class InnerOf(Protocol):
    """Fills the bodies of the node that is being made."""

    def __call__(self, numbers: tuple[int, ...], *lines: Line) -> Node: ...


class Generator:
    """Makes one program."""

    def __init__(self, seed: str, size: int | None = None) -> None:
        self.random = random.Random(seed)
        # Mostly small, for small ones shrink and read well; some large, for what needs many parts.
        self.left = size or self.random.choice((8, 12, 18, 26, 40, 70))
        self.labels = 0
        self.all_tokens: list[int] = []
        self.tokens_of: dict[int, list[int]] = {}
        """By context: tokens made in it or in what it is a clone of. These share one list."""

    def program(self, *, threads_inherit: bool) -> Node:
        """A whole program."""
        body: list[Node] = []
        line = Line()
        while self.left > 0:
            body += self.body(line, MAIN, 0, self.left)
        return Node("main", (int(threads_inherit),), (tuple(body),))

    def body(self, line: Line, place: Place, depth: int, most: int) -> Body:
        nodes: list[Node] = []
        budget = min(self.left, self.random.randint(1, max(1, most)))
        stop = self.left - budget
        words = [word for word in WEIGHTS if allowed(word, place)]
        if depth >= DEEPEST:
            words = [word for word in words if not WORDS[word].bodies]
        weights = [WEIGHTS[word] for word in words]
        while self.left > stop:
            node = self.node(self.random.choices(words, weights)[0], line, place, depth)
            if node is None:
                continue  # it needs what the line does not have; `look` needs nothing, so this ends
            self.left -= 1
            nodes.append(node)
            if node.word == "raise":
                return tuple(nodes)  # what follows would never run
        if place.awaits == "all" and not place.cleanup:
            nodes += self.meet(line, place, depth)
        return tuple(nodes)

    def meet(self, line: Line, place: Place, depth: int) -> Iterator[Node]:
        """Meets some of the line's tasks before its body ends: that is where most happens."""
        while line.tasks and self.random.random() < 0.6:
            node = self.node(self.random.choice(("join", "open", "cancel", "cancel")), line, place, depth)
            if node is not None:
                yield node

    def node(self, word: str, line: Line, place: Place, depth: int) -> Node | None:
        rand = self.random

        def inner(numbers: tuple[int, ...], *lines: Line) -> Node:
            """The node with its bodies filled; each body may use up about half of what is left."""
            bodies: list[Body] = []
            for index in range(len(WORDS[word].bodies)):
                where = inside(Node(word, numbers), index, place)
                whose = lines[min(index, len(lines) - 1)] if lines else line
                most = 3 if where.cleanup else max(2, self.left // 2)
                bodies.append(self.body(whose, where, depth + 1, most) if self.left > 0 else ())
            return Node(word, numbers, tuple(bodies))

        match word:
            case "look":
                return Node(word, (rand.randrange(2),))
            case "set":
                label = self.label(line.tokens)
                self.all_tokens.append(label)
                return Node(word, (label, self.handler()))
            case "reset":
                # Mostly a token at hand, the newest preferred; now and then whatever there is.
                known = line.tokens if line.tokens and rand.random() < 0.9 else self.all_tokens
                return Node(word, (self.newest(known),)) if known else None
            case "enter":
                return Node(word, (self.label(line.holds), self.handler()))
            case "leave":
                return Node(word, (self.newest(line.holds),)) if line.holds else None
            case "with":
                return inner((rand.randrange(3), self.handler()))
            case "copy" | "fresh":
                return Node(word, (self.label(line.contexts),))
            case "clone":
                if not line.contexts:
                    return None
                of = self.newest(line.contexts)
                label = self.label(line.contexts)
                self.tokens_of[label] = self.tokens_of.setdefault(of, [])
                return Node(word, (label, of))
            case "peek":
                return Node(word, (rand.choice(line.contexts),)) if line.contexts else None
            case "run":
                return self.run(line, inner) if line.contexts else None
            case "spawn" | "thread" | "job":
                return self.start(word, line, inner)
            case "work":
                known = line.workers if rand.random() < 0.8 else []
                worker = rand.choice(known) if known else self.label(line.workers)
                kind = rand.choice((CARRYING, PLAIN, PLAIN))
                child = Line()
                gives = self.gives(line, child)
                node = inner((worker, kind, 0, *gives), child)
                self.take_back(line, child)
                return node
            case "join":
                tasks = place.awaits == "all" and (rand.random() < 0.7 or not line.others)
                children = line.tasks if tasks else line.others
                if not children:
                    return None
                label = rand.choice(list(children))
                self.take_back(line, children.pop(label))
                return Node(word, (label,))
            case "open":
                return Node(word, (rand.choice(list(line.tasks)),)) if line.tasks else None
            case "cancel":
                if not line.tasks:
                    return None
                label = rand.choice(list(line.tasks))
                self.take_back(line, line.tasks.pop(label))
                return Node(word, (label, rand.randrange(3)))
            case "scoped":
                flavour = rand.choice((CARRYING, WITH_HANDLER, WITH_HANDLER, IN_CONTEXT))
                if flavour == IN_CONTEXT and not line.contexts:
                    return None
                return inner((flavour, rand.choice(line.contexts) if flavour == IN_CONTEXT else self.handler()))
            case "drive":
                return inner((rand.randrange(2),))
            case "hop":
                return inner((rand.randrange(5), rand.choice((0, 0, 0, 0, 1, 2, 3)), rand.randrange(-1, HANDLERS)))
            case "stream":
                producer = Line()
                made = inner((self.handler(),), producer, producer, line)
                items, cleanup, consumer = made.bodies
                return Node(word, made.numbers, (self.mix("emit", items), cleanup, self.mix("next", consumer)))
            case "catch":
                made = inner(())
                if not place.cleanup and rand.random() < 0.5:
                    return Node(word, (), ((*made.bodies[0], Node("raise")),))
                return made
            case _:  # try, raise, gate, yield, loop, both, race, emit, next
                return inner(())

    def run(self, line: Line, inner: InnerOf) -> Node:
        """Runs a context; then often tries a token there that was made in it, or in what it is a clone of."""
        context = self.newest(line.contexts)
        before = len(line.tokens)
        node = inner((context,))
        made = self.tokens_of.setdefault(context, [])
        body = node.bodies[0]
        if made and self.random.random() < 0.5:
            body = (*body, Node("reset", (self.random.choice(made),)))
        made += line.tokens[before:]
        return Node("run", node.numbers, (body,))

    def start(self, word: str, line: Line, inner: InnerOf) -> Node | None:
        rand = self.random
        with_ = 0
        if word == "spawn":
            kind = rand.choice((CARRYING, CARRYING, CARRYING_TOO, CARRYING_TOO, PLAIN, IN_CONTEXT, WITH_HANDLER))
        elif word == "thread":
            kind = rand.choice((CARRYING, CARRYING_TOO, PLAIN, PLAIN, IN_CONTEXT))
        else:
            kind = rand.choice((CARRYING, CARRYING_TOO, PLAIN))
        if kind == IN_CONTEXT:
            if not line.contexts:
                return None
            with_ = rand.choice(line.contexts)
            line.contexts.remove(with_)
        elif kind == WITH_HANDLER:
            with_ = self.handler()
        child = Line()
        gives = self.gives(line, child)
        self.labels += 1
        label = self.labels
        node = inner((label, kind, with_, *gives), child)
        if word == "spawn" and rand.random() < 0.6:
            node = Node(word, node.numbers, (self.mix("gate", node.bodies[0]), *node.bodies[1:]))
        (line.tasks if word == "spawn" else line.others)[label] = child
        return node

    def mix(self, word: str, body: Body) -> Body:
        """The body with one to three nodes more."""
        nodes = list(body)
        for _ in range(self.random.randint(1, 3)):
            nodes.insert(self.random.randint(0, len(nodes)), Node(word))
        return tuple(nodes)

    def gives(self, line: Line, child: Line) -> list[int]:
        """Moves some of what the line has to its child."""
        gives: list[int] = []
        for have, get in (
            (line.tokens, child.tokens),
            (line.contexts, child.contexts),
            (line.workers, child.workers),
        ):
            for label in [label for label in have if self.random.random() < 0.3][:3]:
                have.remove(label)
                get.append(label)
                gives.append(label)
        return gives

    def take_back(self, line: Line, child: Line) -> None:
        line.tokens += child.tokens
        line.contexts += child.contexts
        line.workers += child.workers

    def label(self, at_hand: list[int]) -> int:
        self.labels += 1
        at_hand.append(self.labels)
        return self.labels

    def newest(self, labels: list[int]) -> int:
        return labels[-1] if self.random.random() < 0.4 else self.random.choice(labels)

    def handler(self) -> int:
        return self.random.randrange(HANDLERS)
