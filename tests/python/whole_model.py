"""A random program of whole requests, which a naive model follows: run in a process that has the library before malloc.

    whole_model.py threads|tasks SEED STEPS

Each step is one of: make a block (malloc and its kin, a Python object, an array), resize one, free one, all of any size
and anybody's; begin a request (inside of another one, or not), end one; fork. Native blocks of 1 KiB and more, and
arrays, must be exact after each step: a step may be off only by a sample, which is a small block of Python's own that
came in between. Small blocks are compared at the end, with the stated error.
"""

import asyncio
import ctypes
import os
import random
import sys
import threading
import traceback

import numpy as np

import ctxalloc

libc = ctypes.PyDLL(None)  # a call that keeps the GIL: nothing happens between two numbers
SIZE, POINTER = ctypes.c_size_t, ctypes.c_void_p
for name, arguments in {
    "malloc": [SIZE],
    "calloc": [SIZE, SIZE],
    "aligned_alloc": [SIZE, SIZE],
    "valloc": [SIZE],
    "realloc": [POINTER, SIZE],
    "reallocarray": [POINTER, SIZE, SIZE],
}.items():
    getattr(libc, name).argtypes, getattr(libc, name).restype = arguments, POINTER
libc.free.argtypes = [POINTER]


def posix_memalign(size):
    place = POINTER()
    assert libc.posix_memalign(ctypes.byref(place), SIZE(512), SIZE(size)) == 0
    return place.value


# Each with what its blocks are multiples of.
MAKERS = [
    (libc.malloc, 16),
    (lambda size: libc.calloc(1, size), 16),
    (lambda size: libc.aligned_alloc(256, size), 256),
    (lambda size: libc.aligned_alloc(1 << 21, size), 1 << 21),
    (posix_memalign, 512),
    (libc.valloc, 4096),
    (lambda size: libc.reallocarray(None, 1, size), 16),
    (lambda size: libc.realloc(None, size), 16),
]
ZEROED = MAKERS[1][0]
EXACT_FROM = 1024


class Owner:
    """A request, and what the model says it holds."""

    def __init__(self, parent):
        self.parent, self.native, self.arrays, self.objects, self.small = parent, 0, 0, 0, 0
        self.has_ended = False
        self.request = ctxalloc.request(whole=True, root=parent is None)
        token = None if parent is None else ctxalloc.set_handler(parent.handler)
        self.request._begin()
        self.handler = self.request.handler
        if token is not None:
            ctxalloc.reset(token)

    def charged(self):
        found, owner = [], self
        while owner is not None:
            found.append(owner)
            owner = owner.parent
        return found

    def add(self, part, size):
        for owner in self.charged():
            setattr(owner, part, getattr(owner, part) + size)

    def check_arrays(self):
        assert self.request.stats.whole.array_bytes == self.arrays, (self.request.stats, vars(self))


class Program:
    def __init__(self, seed):
        self.seed, self.random = seed, random.Random(seed)
        self.owners = [Owner(None) for _ in range(4)]
        self.ended = []
        self.blocks = []
        self.samples = self.forks = 0

    def size(self):
        kind = self.random.random()
        if kind < 0.3:
            return self.random.randrange(1, EXACT_FROM)
        return EXACT_FROM + int(2 ** self.random.uniform(0, 18))

    def step(self, owner=None):
        """One step, while one of the requests is selected."""
        owner = owner or self.random.choice(self.owners)
        token = ctxalloc.set_handler(owner.handler)
        try:
            self.choose(owner)
        finally:
            ctxalloc.reset(token)

    def choose(self, owner):
        what = self.random.random()
        if what < 0.45 and len(self.blocks) > 500:
            what = 0.7
        if what < 0.45 or not self.blocks:
            self.make(owner)
        elif what < 0.65:
            self.resize(owner)
        elif what < 0.985:
            self.free(self.blocks.pop(self.random.randrange(len(self.blocks))))
        elif what < 0.9995:
            self.end_and_begin(owner)
        else:
            self.fork(owner)

    def exactly(self, owners, changes, work):
        """`work`, after which each of these has exactly so many native bytes more."""
        before = [one.request.stats.whole.native_bytes for one in owners]
        result = work()
        for one, old, change in zip(owners, before, changes, strict=True):
            off = one.request.stats.whole.native_bytes - old - change
            if off:
                self.samples += 1
                # Of Python's own, through its RAW domain: a sample, or pymalloc's notes on its arenas.
                assert abs(off) < 64 << 10 or 0 <= off - (128 << 10) < 64 << 10, (self.seed, off, change)
        return result

    def make(self, owner):
        size, kind = self.size(), self.random.randrange(8)
        above = owner.charged()
        if kind < 5:
            maker, align = self.random.choice(MAKERS)
            if size < EXACT_FROM:
                # For one that is aligned to a page glibc takes more than the model says.
                self.make_small(owner, size, maker if align <= 256 else libc.malloc)
                return
            block = self.exactly(above, [size] * len(above), lambda: maker(size))
            assert block % align == 0
            assert libc.malloc_usable_size(POINTER(block)) >= size
            assert maker is not ZEROED or not any(ctypes.string_at(block, size))
            mark = self.random.randrange(256)
            ctypes.memset(block, mark, size)
            owner.add("native", size)
            self.blocks.append(["native", block, size, owner, mark])
        elif kind < 7:
            size += EXACT_FROM
            made = bytearray(size)
            owner.add("objects", size + 1)
            self.blocks.append(["objects", made, size + 1, owner, 0])
        else:
            made = np.empty(size, np.uint8)
            owner.add("arrays", size)
            self.blocks.append(["arrays", made, size, owner, 0])
            owner.check_arrays()

    def make_small(self, owner, size, maker):
        """Several, of which some are samples; the model counts what glibc takes for them."""
        taken = max(32, (size + 8 + 15) // 16 * 16)
        found = [maker(size) for _ in range(20)]
        owner.add("small", 20 * taken)
        self.blocks.append(["small", found, 20 * taken, owner, 0])

    def resize(self, current):
        at = self.random.randrange(len(self.blocks))
        kind, block, old, owner, mark = self.blocks[at]
        new = self.size()
        if kind == "native":
            # Whoever lets a block of a request that has ended grow pays for it from then on.
            payer = current if owner.has_ended and new > max(old, EXACT_FROM - 1) else owner
            everybody = list(dict.fromkeys([*owner.charged(), *payer.charged()]))
            changes = [new * (one in payer.charged()) - old * (one in owner.charged()) for one in everybody]
            block = self.exactly(everybody, changes, lambda: libc.realloc(block, new))
            text = ctypes.string_at(block, min(old, new))
            assert text == bytes([mark]) * len(text), self.seed
            ctypes.memset(block, mark, new)
            owner.add("native", -old)
            payer.add("native", new)
            self.blocks[at] = [kind, block, new, payer, mark]
        elif kind == "objects":
            new += EXACT_FROM
            # A bytearray that shrinks by less than half, or grows, has a rule of its own: replace it.
            owner.add("objects", -old)
            self.blocks[at] = [kind, bytearray(new), new + 1, current, 0]
            current.add("objects", new + 1)
        elif kind == "small" and owner is current:
            # Small ones that grow are charged from then on, whether they were samples or not.
            size = EXACT_FROM + new
            owner.add("small", -old)
            for small in block:
                owner.add("native", size)
                self.blocks.append(["native", libc.realloc(small, size), size, owner, mark])
                ctypes.memset(self.blocks[-1][1], mark, size)
            self.blocks.pop(at)

    def free(self, entry):
        kind, block, size, owner, mark = entry
        above = owner.charged()
        if kind == "native":
            text = ctypes.string_at(block, size)
            assert text == bytes([mark]) * size, self.seed
            self.exactly(above, [-size] * len(above), lambda: libc.free(block))
        elif kind == "small":
            for small in block:
                libc.free(small)
        entry.clear()
        block = None
        owner.add(kind, -size)
        if kind == "arrays":
            owner.check_arrays()

    def end_and_begin(self, owner):
        """Its blocks stay charged to it, and to those around it that have not ended."""
        if any(other is not owner and owner in other.charged() for other in self.owners) or owner.has_ended:
            return
        owner.request._end(None)
        owner.has_ended = True
        self.owners.remove(owner)
        self.ended.append(owner)
        open_ones = [one for one in self.owners if len(one.charged()) < 4]
        self.owners.append(Owner(self.random.choice([None, *open_ones])))

    def fork(self, current):
        self.forks += 1
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                for _ in range(len(self.blocks) // 2):
                    self.free(self.blocks.pop())
                for owner in self.owners:
                    owner.check_arrays()
                self.make(current)
                status = 0
            except BaseException:  # noqa: BLE001 - printed
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0, self.seed

    def end(self):
        everybody = [*self.owners, *self.ended]
        for owner in everybody:
            whole = owner.request.stats.whole
            owner.check_arrays()
            error = 5 * whole.error_bytes + (512 << 10)  # and what is Python's own
            small = whole.native_bytes - owner.native
            assert abs(small - owner.small) <= error, (self.seed, whole, vars(owner))
            error += 2000 * len(self.blocks)  # what the model itself keeps of each, which is objects too
            assert abs(whole.object_bytes - owner.objects) <= error, (self.seed, whole, vars(owner))
            parts = whole.array_at_peak_bytes + whole.native_at_peak_bytes + whole.object_at_peak_bytes
            assert parts == whole.peak_bytes == owner.request.stats.peak_bytes
        while self.blocks:
            self.free(self.blocks.pop())
        for owner in everybody:
            assert owner.native == owner.small == owner.arrays == 0
            whole = owner.request.stats.whole
            assert whole.array_bytes == 0
            assert whole.native_bytes <= 512 << 10, whole  # of Python's own
        self.owners.clear()
        self.ended.clear()


def with_threads(program, steps, threads=4):
    lock = threading.Lock()
    failed = []

    def work():
        try:
            for _ in range(steps // threads):
                with lock:
                    program.step()
        except BaseException as error:
            failed.append(error)
            raise

    working = [threading.Thread(target=work) for _ in range(threads)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    assert not failed, failed


def with_tasks(program, steps, tasks=8):
    """Each task has a request selected in its Context, and steps of the others come between its own."""
    lock = threading.Lock()  # against the steps in threads of the executor

    def step():
        with lock:
            program.step()

    async def work():
        owner = program.random.choice(program.owners)
        token = ctxalloc.set_handler(owner.handler)
        for _ in range(steps // tasks // 2):
            await asyncio.sleep(0)
            while owner.has_ended:
                ctxalloc.reset(token)
                owner = program.random.choice(program.owners)
                token = ctxalloc.set_handler(owner.handler)
            with lock:
                program.choose(owner)
            await asyncio.to_thread(step) if program.random.random() < 0.02 else step()

    async def main():
        await asyncio.gather(*[asyncio.create_task(work()) for _ in range(tasks)])

    asyncio.run(main())


def main():
    way, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    program = Program(seed)
    {"threads": with_threads, "tasks": with_tasks}[way](program, steps)
    program.end()
    print(f"{way}: {steps} steps, {program.forks} forks, {program.samples} steps off by a sample")


main()
