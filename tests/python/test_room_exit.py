"""Waiters when their process ends, or forks: it ends with its status, and nobody hangs or crashes."""

import pytest
import subprocesses

pytestmark = pytest.mark.any_numpy

BEGIN = """
import asyncio, sys, threading, time
import ctxalloc

budget = ctxalloc.Budget(1000, name="b")
def wanting(size, **terms):
    return ctxalloc.request(budget=budget, reserve_bytes=size, root=True, **terms)

def until(count):
    deadline = time.monotonic() + 20
    while budget.waiting != count:
        assert time.monotonic() < deadline, budget.waiting
        time.sleep(0.001)

def wait(size=800):
    with wanting(size):
        print("had room", flush=True)

async def wait_in_a_task(size=800):
    async with wanting(size):
        print("had room", flush=True)

async def some():
    await asyncio.gather(*(wait_in_a_task() for _ in range(3)))

def loop():
    asyncio.run(some())

holder = wanting(600)
holder.__enter__()
"""

# What a finalizer does where modules are taken down: it lets threads run, and gives the room that they wait for.
LATE = """
class Late:
    def __del__(self, sleep=time.sleep, finalizing=sys.is_finalizing, holder=holder, is_given=GIVEN):
        assert finalizing()
        sleep(0.12)  # longer than a thread waits between two looks for signals
        if is_given:
            holder.__exit__(None, None, None)
            sleep(0.05)
sys.late = Late()
"""

# Each leaves so many who wait.
LEFT = {
    "daemon threads": (3, "for _ in range(3): threading.Thread(target=wait, daemon=True).start()"),
    "loops in daemon threads": (6, "for _ in range(2): threading.Thread(target=loop, daemon=True).start()"),
    "a loop that nobody runs": (
        3,
        """
left = asyncio.new_event_loop()
tasks = [left.create_task(wait_in_a_task()) for _ in range(3)]
for task in tasks: task._log_destroy_pending = False
left.run_until_complete(asyncio.sleep(0))
sys.left = left, tasks
asyncio.BaseEventLoop.__del__ = lambda self: None  # which would close it, and say so
""",
    ),
    "coroutines without a loop": (
        3,
        """
class NoLoop(asyncio.AbstractEventLoop):
    def create_future(self): return asyncio.Future(loop=self)
    def call_later(self, *_): pass
    def call_soon_threadsafe(self, *_): pass
    def get_debug(self): return False
sys.left = [wait_in_a_task() for _ in range(3)]
here = sys.here = NoLoop()
asyncio._set_running_loop(here)
for coroutine in sys.left: coroutine.send(None)
asyncio._set_running_loop(None)
""",
    ),
}


@pytest.mark.parametrize("ends", ["", "LATE", "GIVEN"], ids=["at once", "slowly", "given meanwhile"])
@pytest.mark.parametrize("left", LEFT)
def test_a_process_ends_with_waiters(left, ends):
    count, program = LEFT[left]
    late = LATE.replace("GIVEN", str(ends == "GIVEN")) if ends else ""
    printed = subprocesses.says(f"{BEGIN}{program}\nuntil({count})\n{late}\nprint('over', flush=True)")
    assert printed == "over"


def test_the_main_thread_goes_on_to_the_end_of_a_loop_that_is_interrupted():
    printed = subprocesses.says(
        BEGIN
        + """
async def main():
    tasks = [asyncio.create_task(wait_in_a_task()) for _ in range(3)]
    await asyncio.sleep(0)
    print(budget.waiting)
    raise SystemExit(0)
try:
    asyncio.run(main())
finally:
    print(budget.waiting, budget.reserved_bytes)
"""
    )
    assert printed == "3\n0 600"


def test_threads_that_python_waits_for_get_their_room_at_the_end():
    printed = subprocesses.says(
        BEGIN
        + """
holder.__exit__(None, None, None)
held = threading.Event()
def hold():
    with wanting(1000):
        held.set()
        threading.main_thread().join()
        time.sleep(0.06)
threading.Thread(target=hold).start()
held.wait(20)
for _ in range(3): threading.Thread(target=wait).start()
threading.Thread(target=loop).start()
until(6)
"""
    )
    assert printed.split("\n") == ["had room"] * 6


def test_a_fork_with_waiters_in_a_loop_has_none_of_them_in_its_child():
    printed = subprocesses.says(
        BEGIN
        + """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)

async def main():
    tasks = [asyncio.create_task(wait_in_a_task(401 + number)) for number in range(3)]
    await asyncio.sleep(0)
    assert budget.waiting == 3
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert (budget.waiting, ctxalloc.metrics.waiting()) == (0, [])
            # What the parent's tasks wait for is not theirs any more: closed or run, they leave nothing.
            coroutine = tasks[0].get_coro()
            coroutine.close()
            try:
                tasks[1].get_coro().throw(TimeoutError())
            except TimeoutError:
                pass
            assert (budget.waiting, budget.reserved_bytes) == (0, 600)
            for _ in range(2):  # there is a loop, and a queue, of its own
                with ctxalloc.request(budget=budget, reserve_bytes=400, root=True):
                    async def behind():
                        async with wanting(300):
                            return budget.reserved_bytes
                    async def both():
                        task = asyncio.create_task(behind())
                        await asyncio.sleep(0)
                        assert budget.waiting == 1
                        task.cancel()
                        await asyncio.wait((task,))
                    asyncio.run(both())
            assert (budget.waiting, budget.reserved_bytes) == (0, 600)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert budget.waiting == 3
    ends.set()  # the parent's go on
    await asyncio.wait_for(asyncio.gather(*tasks), 20)

holder.__exit__(None, None, None)
has_begun, ends = threading.Event(), threading.Event()
def hold():
    with wanting(600):
        has_begun.set()
        ends.wait(20)
holding = threading.Thread(target=hold)
holding.start()
has_begun.wait(20)
asyncio.run(main())
holding.join()
print(budget.waiting, budget.reserved_bytes)
"""
    )
    assert printed == "had room\n" * 3 + "0 0"
