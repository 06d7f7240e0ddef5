"""Whole requests at their limit while a trace or profile function observes the thread, as debuggers and profilers do.

CPython removes one that raises, and the exception goes on in the code that is observed: asyncio's, a lock's.
"""

import sys

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]

START = """
import cffi
# A function in C, of a library of which nobody knows whether it survives NULL.
from _cffi_backend import newp as take
what = cffi.FFI().typeof("char[]"), 4 * MiB
kept_by_tool = []
def observe(frame, event, argument):
    kept_by_tool.append((event, [0.0] * 10))
    del kept_by_tool[:-100]
    return observe
how = sys.argv[1]
observes = lambda: getattr(sys, f"get{how}")() is observe
begin = lambda: getattr(sys, f"set{how}")(observe)
end = lambda: getattr(sys, f"set{how}")(None)
"""

needs_monitoring = pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="sys.monitoring: since CPython 3.12")
WAYS = pytest.mark.parametrize("how", ["trace", "profile"])


@WAYS
@pytest.mark.parametrize("where", ["main", "thread"])
def test_the_request_is_told_and_the_tool_stays(how, where):
    check(
        START
        + """
def observed():
    begin()
    try:
        kept = []
        with ctxalloc.request(whole=True, limit_bytes=4 * MiB) as request:
            for _ in range(100):
                kept.append(take(*what))
    except ctxalloc.BudgetExceeded as error:
        names = []
        step = error.__traceback__
        while step:
            names.append(step.tb_frame.f_code.co_name)
            step = step.tb_next
        assert names == ["observed"], names
    else:
        raise AssertionError("not told")
    finally:
        assert observes(), "the tool was removed"
        end()
    assert request.stats.peak_bytes < 24 * MiB, request.stats  # all of them are 400
    answers.append(True)
answers = []
if sys.argv[2] == "main":
    observed()
else:
    thread = threading.Thread(target=observed)
    thread.start()
    thread.join()
assert answers
""",
        how,
        where,
    )


@WAYS
def test_no_callback_of_asyncios_is_lost(how):
    check(
        START
        + """
async def one():
    async with ctxalloc.request(whole=True, limit_bytes=MiB):
        await asyncio.gather(asyncio.to_thread(take, *what), asyncio.sleep(0))
problems = []
async def main():
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    refused = 0
    for _ in range(20):
        begin()
        try:
            await asyncio.wait_for(one(), 20)
        except ctxalloc.BudgetExceeded:
            refused += 1
        end()
    assert refused == 20, refused
asyncio.run(main())
assert not problems, problems
""",
        how,
        timeout=100,
    )


@pytest.mark.parametrize("how", ["trace", pytest.param("monitoring", marks=needs_monitoring)])
def test_no_handler_is_skipped_where_an_event_is_told_of(how):
    """CPython makes numbers and a frame for each event; refused there, it left a block before its handler had begun."""
    check(
        """
class Down(Exception): pass
class Guard:
    def __init__(self):
        self.entered = self.left = self.finished = False
        self.caught = 0
    def __enter__(self):
        self.entered = True
    def __exit__(self, *_):
        self.left = True
# Only behind so many instructions is an event's offset a number that CPython has to make.
program = "def work(guard):\\n" + "".join(f"    x{number} = {number}\\n" for number in range(80)) + '''
    with ctxalloc.request(limit_bytes=MiB // 2, whole=True):
        with guard:
            kept = None
            try:
                for number in range(40):
                    try:
                        while True:
                            try:
                                raise Down(number)
                            except Down as error:
                                kept = (error.with_traceback(None), kept)
                    except MemoryError:
                        guard.caught += 1
            finally:
                guard.finished = True
                del kept
'''
exec(program)
def tracing(*_):
    return tracing
if sys.argv[1] == "monitoring":
    events = sys.monitoring.events.LINE, sys.monitoring.events.EXCEPTION_HANDLED
    sys.monitoring.use_tool_id(1, "test")
    for event in events:
        sys.monitoring.register_callback(1, event, lambda *_: None)
    sys.monitoring.set_events(1, sum(events))
sys.setswitchinterval(1e-6)
skipped, caught = [], []
def many():
    if sys.argv[1] == "trace":
        sys.settrace(tracing)
    for _ in range(20):
        guard = Guard()
        try:
            work(guard)
        except MemoryError:
            pass
        if guard.entered and not (guard.left and guard.finished) or ctxalloc.current_request() is not None:
            skipped.append((guard.left, guard.finished, ctxalloc.current_request()))
            break
        caught.append(guard.caught)
    sys.settrace(None)
threads = [threading.Thread(target=many) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not skipped, skipped
# What tells of the limit may come outside of the inner block, seldom.
assert sum(number >= 35 for number in caught) > len(caught) / 2 == 30, caught
""",
        how,
    )


@needs_monitoring
def test_an_audit_hook_may_forbid_to_watch():
    """It forbids also us, who watch some lines of our own to learn which functions tell of events."""
    check("""
        asked = []
        def hook(event, arguments):
            if event.startswith("sys.monitoring."):
                asked.append(event)
                raise PermissionError(event)
        sys.addaudithook(hook)
        try:
            with ctxalloc.request(whole=True, limit_bytes=MiB):
                bytearray(2 * MiB)
        except MemoryError:
            pass
        else:
            raise AssertionError("not held")
        assert asked
        assert not any(sys.monitoring.get_tool(tool) for tool in range(6)), "a number is free again"
    """)


@pytest.mark.parametrize("how", ["trace", "nobody"])
def test_a_limit_holds_where_another_thread_makes_the_call(how):
    """The next thread that Python runs makes it. Where that was another one, small blocks were given without end.

    And where a refusal told the request meanwhile, the thread went on as if it were about to be told.
    """
    check(
        """
class Down(Exception): pass
endless, peaks = [], []
async def work():
    kept = None
    async with ctxalloc.request(limit_bytes=400 * KiB, whole=True) as request:
        try:
            for number in range(30):
                try:
                    for turn in range(100_000):
                        try:
                            raise Down(number)
                        except Down as error:
                            kept = (error.with_traceback(None), kept)
                    endless.append(number)
                    break
                except MemoryError:
                    await asyncio.sleep(0)
        finally:
            kept = None
            peaks.append(request.stats.peak_bytes)
def tracing(*_):
    return tracing
async def main():
    try:
        await work()
    except MemoryError:
        pass
def many():
    if sys.argv[1] == "trace":
        sys.settrace(tracing)
    for _ in range(40):
        if not endless:
            asyncio.run(main())
    sys.settrace(None)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=many) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not endless, (endless, max(peaks))
assert max(peaks) < MiB, max(peaks)
""",
        how,
    )
