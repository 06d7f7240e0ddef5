"""Recordings that are made here, in the format of docs/recording-format.md: written anew, to test the crate too.

``Script`` writes down what requests do, a microsecond apart or by a clock of its own, and keeps each request's account.
"""

import zlib
from pathlib import Path
from typing import Final

MAGIC: Final = b"\x89CTXREC\x01"
BEGIN, ALLOCATE, RESIZE, FREE, END, END_USED = 0, 1, 2, 3, 5, 7


def number(value: int) -> bytes:
    """LEB128."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def change(before: int, after: int) -> bytes:
    """A difference in zigzag."""
    difference = after - before
    return number(difference << 1 if difference >= 0 else (-difference << 1) - 1)


def text(words: str) -> bytes:
    """A text with its length."""
    return number(len(words.encode())) + words.encode()


def frame(body: bytes) -> bytes:
    """A body with its head."""
    length = len(body).to_bytes(4, "little")
    sums = zlib.crc32(b"ctxalloc" + length), zlib.crc32(body)
    return length + b"".join(one.to_bytes(4, "little") for one in sums) + body


class Account:
    """What a request's account says."""

    def __init__(self) -> None:
        self.peak = self.total = self.blocks = self.live = 0

    def grow(self, size: int) -> None:
        self.total += max(size, 0)
        self.live += size
        self.peak = max(self.peak, self.live)


class Script:
    """Events in their order."""

    def __init__(self, step_ns: int = 1000) -> None:
        self.now = 0
        self.step_ns = step_ns
        self.names: list[str] = []
        self.events: list[tuple[int, int, int, int, bytes]] = []
        """When, on which thread, in which request, which kind with its flag, the block before and the rest."""
        self.accounts: dict[int, Account] = {}
        self.sizes: dict[int, tuple[int, int]] = {}
        self.requests = self.blocks = 0
        self.used: list[tuple[int, int, int]] = []
        """Nanoseconds of processor time, requests, and how many of them were recorded, until now."""

    def _add(self, thread: int, request: int, kind: int, rest: bytes) -> None:
        self.now += self.step_ns
        self.events.append((self.now, thread, request, kind, rest))

    def rest(self, seconds: float) -> None:
        """Nothing happens for so long."""
        self.now += int(seconds * 1e9)

    def begin(self, name: str, thread: int = 0, parent: int = 0) -> int:
        """A request begins, inside of another one or not; its number. Its account is its own."""
        if name not in self.names:
            self.names.append(name)
        self.requests += 1
        self.accounts[self.requests] = Account()
        self._add(thread, self.requests, BEGIN, number(self.names.index(name)) + number(0) + number(parent))
        return self.requests

    def make(self, request: int, size: int, thread: int = 0, *, zeroed: bool = False) -> int:
        """A block is made; its number."""
        self.blocks += 1
        account = self.accounts[request]
        account.blocks += 1
        account.grow(size)
        self.sizes[self.blocks] = request, size
        self._add(
            thread, request, ALLOCATE | (0x40 if zeroed else 0), change(0, self.blocks) + number(size) + number(5)
        )
        return self.blocks

    def resize(self, block: int, size: int, thread: int = 0) -> None:
        """A block gets another size."""
        request, before = self.sizes[block]
        self.sizes[block] = request, size
        self.accounts[request].grow(size - before)
        self._add(thread, request, RESIZE, change(0, block) + number(size))

    def free(self, block: int, thread: int = 0) -> None:
        """A block is freed."""
        request, size = self.sizes.pop(block)
        self.accounts[request].grow(-size)
        self._add(thread, request, FREE, change(0, block))

    def end(self, request: int, thread: int = 0, *, processor_ns: int | None = None) -> None:
        """A request ends, with what the process spent on processors meanwhile, if that is said."""
        one = self.accounts[request]
        used = () if processor_ns is None else (0, processor_ns)
        sums = b"".join(map(number, (one.peak, one.total, one.blocks, one.live, 0, *used)))
        self._add(thread, request, END if processor_ns is None else END_USED, sums)

    def write(self, path: Path, handler: str = "default_allocator", *, process: int = 1) -> Path:
        """Writes a file of it, as if this handler had made all blocks, in the process of this number."""
        head = b"\0" + number(process) + text("0.1.0") + text("linux x86_64")
        head += b"".join(map(number, (4096, 2, 1_700_000_000_000_000_000, 1, 10_000)))
        bodies = [head, *(b"\2" + number(at) + text(name) for at, name in enumerate(self.names))]
        bodies.append(b"\3" + number(0) + text(handler))
        for at_ns, thread, request, kind, rest in self.events:
            # Each event's body stands for itself, so its block is told as a change from 0.
            first = bytes([1, kind | 0x10 | 0x20]) + number(at_ns) + change(0, request) + number(thread)
            bodies.append(first + rest)
        bodies += [b"\7" + b"".join(map(number, used)) for used in self.used]
        bodies.append(b"\5")
        path.write_bytes(MAGIC + b"".join(map(frame, bodies)))
        return path


KiB, MiB = 1 << 10, 1 << 20


def all_die_at_once(requests: int = 24) -> Script:
    """Each request makes many blocks of middle size, and all are freed at its end."""
    script = Script()
    for _ in range(requests):
        request = script.begin("POST /at-once")
        blocks = [script.make(request, 300 * KiB + 4096 * at) for at in range(40)]
        for block in blocks:
            script.free(block)
        script.end(request)
    return script


def long_tail(requests: int = 60) -> Script:
    """Small blocks between large ones escape from each request, and live for the next thirty requests."""
    script, kept = Script(), []
    for _ in range(requests):
        request = script.begin("POST /tail")
        large = []
        for _at in range(8):
            large.append(script.make(request, 2 * MiB))
            kept.append(script.make(request, 700))
        for block in large:
            script.free(block)
        script.end(request)
        while len(kept) > 8 * 30:
            script.free(kept.pop(0))
    return script


def one_size(requests: int = 100) -> Script:
    """Blocks of one small size, a few at a time, in requests that take a while."""
    script = Script(step_ns=20_000)
    for _ in range(requests):
        request = script.begin("GET /one-size")
        for _at in range(30):
            blocks = [script.make(request, 4 * KiB) for _ in range(3)]
            for block in blocks:
                script.free(block)
        script.end(request)
    return script


def powers_and_one(requests: int = 60) -> Script:
    """Sizes just above powers of two, small ones, in requests that take a while."""
    script = Script(step_ns=30_000)
    for _ in range(requests):
        request = script.begin("GET /odd")
        blocks = [script.make(request, (1 << at % 8 + 6) + 1) for at in range(60)]
        for block in blocks:
            script.free(block)
        script.end(request)
    return script


def zeroed_giants(requests: int = 20) -> Script:
    """One zeroed block of 34 MiB for each request."""
    script = Script()
    for _ in range(requests):
        request = script.begin("POST /giant")
        block = script.make(request, 34 * MiB, zeroed=True)
        script.free(block)
        script.end(request)
    return script


def passed_on(requests: int = 30) -> Script:
    """A thread makes blocks, and another one frees them."""
    script = Script()
    for _ in range(requests):
        request = script.begin("POST /pipe", thread=1)
        blocks = [script.make(request, 512 * KiB, thread=1) for _ in range(12)]
        for block in blocks:
            script.free(block, thread=2)
        script.end(request, thread=1)
    return script


def bursts(requests: int = 60) -> Script:
    """Five requests at a time, then five minutes of rest."""
    script = Script()
    for _ in range(requests // 5):
        open_now = [script.begin("POST /burst", thread=at) for at in range(5)]
        blocks = [script.make(request, 3 * MiB, thread=at) for at, request in enumerate(open_now)]
        for at, block in enumerate(blocks):
            script.free(block, thread=at)
        for at, request in enumerate(open_now):
            script.end(request, thread=at)
        script.rest(300)
    return script


def slow_requests(requests: int = 50) -> Script:
    """A little memory in requests that take most of their time elsewhere."""
    script = Script(step_ns=10_000_000)
    for _ in range(requests):
        request = script.begin("GET /slow")
        script.free(script.make(request, 200 * KiB))
        script.end(request)
    return script


def growing(requests: int = 24) -> Script:
    """One block that grows step by step, to 8 MiB."""
    script = Script()
    for _ in range(requests):
        request = script.begin("POST /grow")
        block = script.make(request, 256 * KiB)
        for at in range(2, 33):
            script.resize(block, at * 256 * KiB)
        script.free(block)
        script.end(request)
    return script


def few_requests() -> Script:
    """Too few to say anything."""
    return all_die_at_once(5)


def two_halves(requests: int = 60) -> Script:
    """Small requests first, and then large ones."""
    script = Script()
    for at in range(requests):
        request = script.begin("POST /changed")
        blocks = [script.make(request, 30 * KiB if at < requests // 2 else 600 * KiB) for _ in range(10)]
        for block in blocks:
            script.free(block)
        script.end(request)
    return script


def in_each_others_way(turns: int = 5) -> Script:
    """Three routes in turns: what a pool keeps of the first two stands beside what the other has alive.

    Their blocks are a small part of their time: what a pool saves of it pays for none of that, whatever a page fault
    costs. They are of sizes that a pool has, so that no route is larger with it by itself.
    """
    script = Script()
    for _ in range(turns):
        for name, times, seconds, sizes in (
            ("POST /many", 4, 0.02, [512 * KiB] * 40),
            ("POST /large", 4, 0.02, [34 * MiB]),
            ("POST /small", 20, 0.001, [300 * KiB] * 3),
        ):
            for _at in range(times):
                request = script.begin(name)
                blocks = [script.make(request, size) for size in sizes]
                script.rest(seconds)
                for block in blocks:
                    script.free(block)
                script.end(request)
    return script
