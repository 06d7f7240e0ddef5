"""How a process ends or forks: interpreter exit with live arrays and live Rust futures, fork, subprocesses."""

import os
import sys

import pytest
import subprocesses
from built_in import HANDLERS

# Python 3.12 and later warn of what is tested here: a fork in a process with threads.
FORK_IN_PEACE = ("-W", "ignore:This process:DeprecationWarning")


def test_an_interpreter_exits_quietly_with_live_arrays() -> None:
    # In module globals, in a cycle, in a thread's locals, in a ContextVar, in an object with a finalizer.
    printed = subprocesses.says(
        """
import contextvars, threading, numpy as np, ctxalloc, sys
ctxalloc.register("made here", ctxalloc.strategies.Aligned(align=4096))
arrays = []
for chosen in ctxalloc.handlers():
    with ctxalloc.use(chosen):
        arrays += [np.ones(size) for size in (1, 100, 100_000)]
        arrays.append(np.array([arrays, None], dtype=object))
cycle = []
cycle.append((cycle, np.ones(1000)))
variable = contextvars.ContextVar("holds an array")
ctxalloc.set_handler("pool")
variable.set(np.ones(1000))
class Late:
    def __init__(self): self.array = np.ones(1000)
    def __del__(self): self.array.resize(2000, refcheck=False); self.array = None
late = Late()
sys.modules["holds an array"] = np.ones(3)
hold = threading.Event()
def worker():
    with ctxalloc.use("pool"):
        local = np.ones(1000)
        hold.wait()
threading.Thread(target=worker, daemon=True).start()
scope = ctxalloc.use("tracked"); scope.__enter__()
print("ends")
"""
    )
    assert printed == "ends"


def test_scopes_and_generators_that_are_open_at_exit_are_quiet() -> None:
    printed = subprocesses.says(
        """
import ctxalloc, numpy as np
@ctxalloc.use("aligned64")
def numbers():
    with ctxalloc.use("system"):
        yield np.ones(10)
        yield
steps = numbers()
next(steps)
scope = ctxalloc.use("aligned64")
scope.__enter__()
token = ctxalloc.set_handler("system")
print("ends")
"""
    )
    assert printed == "ends"


@pytest.mark.parametrize(("last", "tries"), [("", 8), ("raise SystemExit(0)", 2)])
def test_an_interpreter_exits_quietly_with_rust_futures_on_their_way(last: str, tries: int) -> None:
    # Workers that attach while the interpreter goes down used to abort one process in ten. Many tries, many futures.
    printed = subprocesses.says(
        f"""
import subprocess, sys
program = '''
import asyncio, sys, ctxalloc, ctxalloc_example as example
async def main():
    return [example.array_made_in("aligned64", 100) for _ in range(100)] + [
        example.handlers_on_the_way(50) for _ in range(100)
    ]
futures = asyncio.run(main())
{last}
'''
for _ in range({tries}):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
print("ends")
"""
    )
    assert printed == "ends"


def test_a_worker_inside_python_at_exit_may_finish_what_it_does() -> None:
    # The gate waits for those inside; here one that needs the GIL several times to get out.
    printed = subprocesses.says(
        """
import asyncio, atexit, threading, sys, ctxalloc_example as example, ctxalloc
inside, go = threading.Event(), threading.Event()
class Slow:
    def __call__(self):
        inside.set()
        go.wait()
        for _ in range(1000):
            threading.Event().wait(0)   # lets go of the GIL, and takes it back
        print("finished", ctxalloc.current().name, flush=True)
        raise LookupError
async def main():
    example.await_python(Slow(), "aligned64")
    await asyncio.to_thread(inside.wait)
asyncio.run(main())
atexit.register(go.set)   # runs before the gate is closed: it was registered later
"""
    )
    assert printed == "finished aligned64"


def test_a_forked_child_uses_frees_and_registers_as_its_parent_does() -> None:
    printed = subprocesses.says(
        f"""
import os, sys, threading, numpy as np, ctxalloc
names = {HANDLERS!r}
arrays = {{}}
for name in names:
    with ctxalloc.use(name):
        arrays[name] = [np.full(size, 7, np.uint8) for size in (1, 1000, 1_000_000)]
ctxalloc.set_handler("aligned64")
for round in range(5):
    child = os.fork()
    who = "child" if child == 0 else "parent"
    try:
        assert ctxalloc.current().name == "aligned64"
        for name, kept in arrays.items():
            for array in kept:
                assert (array == 7).all() and ctxalloc.handler_of(array).name == name
                array.resize(array.size + 10, refcheck=False)
                array[:] = 7
        if child == 0:
            mine = ctxalloc.register(f"the child's {{round}}", ctxalloc.strategies.Aligned(align=128))
            with ctxalloc.use(mine):
                assert ctxalloc.handler_of(np.ones(5)) is mine
            seen = []
            thread = threading.Thread(target=lambda: seen.append(ctxalloc.current().name))
            thread.start(); thread.join()
            assert len(seen) == 1
            arrays.clear()
            os._exit(0)
        ctxalloc.register(f"the parent's {{round}}", ctxalloc.strategies.System())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
names = [handler.name for handler in ctxalloc.handlers()]
assert not any(name.startswith("the child's") for name in names), names
print("ends")
""",
        *FORK_IN_PEACE,
    )
    assert printed == "ends"


def test_a_child_forked_while_others_register_can_register_itself() -> None:
    printed = subprocesses.says(
        """
import os, threading, ctxalloc, itertools
stop = threading.Event()
numbers = itertools.count()
def registers():
    while not stop.is_set():
        ctxalloc.register(f"by a thread {next(numbers)}", ctxalloc.strategies.System())
threads = [threading.Thread(target=registers) for _ in range(3)]
for thread in threads: thread.start()
for round in range(15):
    child = os.fork()
    if child == 0:
        ctxalloc.register("by the child", ctxalloc.strategies.System())
        os._exit(0 if ctxalloc.handler("by the child") in ctxalloc.handlers() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.set()
for thread in threads: thread.join()
print("ends")
""",
        *FORK_IN_PEACE,
    )
    assert printed == "ends"


def test_a_fork_waits_for_what_a_thread_first_uses() -> None:
    printed = subprocesses.says(
        """
import os, signal, sys, threading, time, ctxalloc
begun = threading.Event()
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "ctxalloc.strategies":
            begun.set()
            time.sleep(0.3)
sys.meta_path.insert(0, Slow())
user = threading.Thread(target=lambda: ctxalloc.strategies)
user.start()
assert begun.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(20)
    ctxalloc.register("by the child", ctxalloc.strategies.System())
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
user.join()
print("ends")
""",
        *FORK_IN_PEACE,
    )
    assert printed == "ends"


FORKED_WITHIN_A_FIRST_USE = """
import os, sys, threading
import ctxalloc

budget = ctxalloc.Budget(1 << 20, name="b")

def reserve():
    with ctxalloc.request(budget=budget, reserve_bytes=1000, timeout=1, root=True):
        pass

def first():
    request = ctxalloc.request(budget=budget, reserve_bytes=1000, timeout=1, root=True)
    begun.append(True)
    with request:
        pass

begun = []
sys.setswitchinterval(10)  # only what gives the GIL up by itself is interrupted
thread = threading.Thread(target=first)
thread.start()
while not begun:
    os.sched_yield()
child = os.fork()
if not child:
    reserves = threading.Thread(target=reserve, daemon=True)
    sys.setswitchinterval(0.005)
    reserves.start()
    reserves.join(20)
    os._exit(3 if reserves.is_alive() else 0)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_within_a_first_reservation_can_reserve() -> None:
    """What is looked up once is waited for by nobody: the thread that looks it up is not in the child."""
    for _ in range(6):
        assert subprocesses.says(FORKED_WITHIN_A_FIRST_USE, "-W", "ignore") == "0"


def test_a_forked_child_refuses_rust_futures_if_its_parent_had_some() -> None:
    printed = subprocesses.says(
        """
import asyncio, os, sys, ctxalloc_example as example
async def main():
    return await example.handlers_on_the_way(1)
def in_child(expect_refusal):
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(main())
        except RuntimeError as error:
            os._exit(0 if expect_refusal and "was forked from process" in str(error) else 1)
        os._exit(1 if expect_refusal else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
in_child(False)    # no runtime yet: the child makes its own
asyncio.run(main())
in_child(True)     # the runtime's threads are not in the child: it would wait for ever
asyncio.run(main())
print("ends")
""",
        *FORK_IN_PEACE,
    )
    assert printed == "ends"


def test_a_child_forked_inside_of_an_attached_task_exits() -> None:
    # Its gate must not wait for threads that the child does not have.
    printed = subprocesses.says(
        """
import asyncio, faulthandler, os, sys, threading, ctxalloc_example as example
inside, go = threading.Event(), threading.Event()
class Stays:
    def __call__(self):
        inside.set()
        go.wait()
        raise LookupError
async def main():
    example.await_python(Stays())
    await asyncio.to_thread(inside.wait)
asyncio.run(main())
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(5, exit=True)   # the gate would wait for ten seconds
    sys.exit(0)        # through atexit, as the parent
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
go.set()
print("ends")
""",
        *FORK_IN_PEACE,
    )
    assert printed == "ends"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_carries_names_not_memory(method: str, tmp_path: object) -> None:
    path = os.path.join(str(tmp_path), "program.py")  # noqa: PTH118
    with open(path, "w") as file:  # noqa: PTH123
        file.write(
            """
import multiprocessing, sys, numpy as np, ctxalloc

def work(arguments):
    handler, array = arguments
    with ctxalloc.use(handler):
        doubled = array * 2
    assert ctxalloc.handler_of(doubled) is handler
    return handler, doubled

if __name__ == "__main__":
    ctxalloc.set_handler("aligned64")
    handlers = [ctxalloc.handler(name) for name in ("system", "aligned64", "default_allocator")]
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        for handler, array in pool.map(work, [(handler, np.arange(50)) for handler in handlers * 4]):
            assert handler in handlers and (array == np.arange(50) * 2).all()
        pool.close()
        pool.join()
    print("ends")
"""
        )
    import subprocess

    done = subprocess.run([sys.executable, path, method], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


UNFINISHED = {
    "coroutine": """
import asyncio
async def work():
    async with scope():
        await asyncio.sleep(100)
loop = asyncio.new_event_loop()
task = loop.create_task(work())
loop.run_until_complete(asyncio.sleep(0))
""",
    "generator": """
import contextvars
def steps():
    with scope():
        yield
generator = steps()
contextvars.Context().run(next, generator)
""",
    "reset": """
import contextvars
class Late:
    token = contextvars.Context().run(ctxalloc.set_handler, "pool")
    def __del__(self, reset=ctxalloc.reset):
        reset(self.token)
late = Late()
""",
}


CASES = [(kind, scope) for kind in ("coroutine", "generator") for scope in ("request()", "use('pool')")]


@pytest.mark.parametrize(("kind", "scope"), [*CASES, ("reset", "")])
def test_what_is_never_finished_leaves_with_a_value_error_at_exit(kind: str, scope: str) -> None:
    program = f"import ctxalloc\nscope = lambda: {f'ctxalloc.{scope}' if scope else None}\n{UNFINISHED[kind]}"
    outcome = subprocesses.run(program)
    assert outcome.code == 0, outcome
    assert "panic" not in outcome.err, outcome.err
    assert "ValueError: " in outcome.err, outcome.err
    assert "another Context" in outcome.err or "another context" in outcome.err
