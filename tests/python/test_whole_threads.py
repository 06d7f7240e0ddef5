"""Whole requests at their limits on threads: what others share is left whole, whoever is told, and where."""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]

START = """
    import collections, logging, queue, traceback
    lock = threading.Lock()
    class Helped:
        "It allocates while it has the lock, in functions that enter and leave blocks, or that those call."
        def __enter__(self):
            self.take()
            return self
        def take(self):
            lock.acquire()
            self.taken = [[n] for n in range(60)]
        def give(self):
            self.given = [[n] for n in range(30)]
            lock.release()
        def __exit__(self, *_):
            self.give()
    class Named:
        def acquire(self):
            lock.acquire()
            self.taken = [[n] for n in range(60)]
            return self
        def release(self, *_):
            self.given = [[n] for n in range(30)]
            lock.release()
        __enter__, __exit__ = acquire, release
    condition, items = threading.Condition(), queue.Queue()
    items.put(0)
    def use_condition():
        with condition:
            pass
    def use_queue():
        item = items.get(timeout=10)
        items.put(item)
    def use_helped():
        with Helped():
            pass
    def use_named():
        with Named():
            pass
    def work(use):
        held = []
        while True:
            use()
            held.append([[n] for n in range(20)])
    def is_whole():
        found = [name for name, one in (("lock", lock), ("condition", condition), ("queue", items.mutex))
                 if not one.acquire(blocking=False) or one.release()]
        return not found and items.qsize() == 1
    inner = collections.Counter()
    def attempt(run, use, limit_bytes):
        try:
            run(use, limit_bytes)
        except ctxalloc.BudgetExceeded as error:
            told = "".join(traceback.format_exception(error))
            while error.__context__ is not None:
                error = error.__context__  # a MemoryError that became a BudgetExceeded
            frames = traceback.extract_tb(error.__traceback__)
            inner[frames[-1].name if frames[-1].filename == "<string>" else frames[-1].filename] += 1
        assert is_whole(), f"{use.__name__} {limit_bytes}: {told}"
    def within(use, limit_bytes):
        with ctxalloc.request(whole=True, limit_bytes=limit_bytes, root=True):
            work(use)
    def in_thread(use, limit_bytes):
        errors = []
        def run():
            try:
                within(use, limit_bytes)
            except BaseException as error:
                errors.append(error)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        assert errors, "it waits for ever"
        raise errors[0]
    def passed_on(use, limit_bytes):
        async def main():
            async with ctxalloc.request(whole=True, limit_bytes=limit_bytes, root=True):
                await asyncio.to_thread(work, use)
        asyncio.run(main())
    numbers = random.Random(7)
    LIMITS = [numbers.randrange(1 << 16, 1 << 21) for _ in range(40)]
"""


@pytest.mark.long
@pytest.mark.parametrize("run", ["within", "in_thread", "passed_on"])
@pytest.mark.parametrize("use", ["condition", "queue", "helped", "named"])
def test_what_enters_or_leaves_a_block_is_not_broken_off(run: str, use: str) -> None:
    """Its function may have any name, or call others: locks that a process shares stayed locked, and others hung."""
    check(
        START
        + f"""
    for limit_bytes in LIMITS:
        attempt({run}, use_{use}, limit_bytes)
    assert sum(inner.values()) == 40, inner
    """
    )


def test_a_request_on_a_thread_is_told_in_its_own_code() -> None:
    check(
        START
        + """
    for limit_bytes in LIMITS:
        for use in (use_condition, use_queue):
            attempt(in_thread, use, limit_bytes)
    assert set(inner) <= {"work", "<listcomp>", "use_condition", "use_queue"}, inner
    assert sum(inner.values()) == 80
    """
    )
