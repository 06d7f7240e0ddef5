"""What each strategy costs, from Python: the table of docs/strategies.md.

`.venv/bin/python benches/each_strategy.py` prints microseconds, the least of seven rounds, each strategy in a process
of its own. `benches/python.py` is the one that compares with peers and judges; this one says in which order each is.
"""

import ctypes
import json
import subprocess
import sys
import timeit

import numpy as np

import ctxalloc
from ctxalloc import GiB, strategies
from ctxalloc.strategies import (
    Aligned,
    Arena,
    Budgeted,
    Callbacks,
    Fallback,
    Faulty,
    Guard,
    HugePages,
    Locked,
    Numa,
    Pool,
    SharedMemory,
    System,
    Tracked,
    Zeroing,
)

WORK = {
    "np.empty(1000)": lambda: np.empty(1000),
    "np.full(1 << 17, 1.0), 1 MiB": lambda: np.full(1 << 17, 1.0),
    "np.full(1 << 23, 1.0), 64 MiB": lambda: np.full(1 << 23, 1.0),
}


class _Allocator(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("ctx", "malloc", "calloc", "realloc", "free")]


def c_functions() -> Callbacks:
    """The C functions behind the handler `system`, called by way of their addresses."""
    look_in = ctypes.pythonapi.PyCapsule_GetPointer
    look_in.restype, look_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    struct = look_in(ctxalloc.handler("system").capsule, b"mem_handler")
    c = _Allocator.from_address(struct + 128)
    return Callbacks(malloc=c.malloc, calloc=c.calloc, realloc=c.realloc, free=c.free, ctx=c.ctx)


MAKE = {
    "NumPy's default": lambda: None,
    "System()": System,
    "Aligned()": Aligned,
    "Pool()": Pool,
    "Arena()": Arena,
    "Budgeted(Pool(), ...)": lambda: Budgeted(Pool(), limit_bytes=8 * GiB),
    "Faulty(Pool(), ...)": lambda: Faulty(Pool(), probability=0.0),
    "Fallback(Pool(), System())": lambda: Fallback(Pool(), System()),
    "Tracked()": Tracked,
    "Tracked(traceback=8)": lambda: Tracked(traceback=8),
    "Zeroing(Pool())": lambda: Zeroing(Pool()),
    "HugePages()": HugePages,
    "Numa(node=0)": lambda: Numa(node=0),
    "Locked()": Locked,
    "Guard()": Guard,
    "SharedMemory()": SharedMemory,
    "Callbacks(...), C": c_functions,
}


def measure(name: str) -> list[float]:
    """Microseconds for each piece of work under one strategy; the least of seven rounds."""
    strategy: strategies.Strategy | None = MAKE[name]()
    ctxalloc.set_handler(None if strategy is None else ctxalloc.register("measured", strategy))
    found = []
    for work in WORK.values():
        timer = timeit.Timer(work)
        once = min(timer.repeat(3, 1))
        number = max(3, int(0.05 / once))
        found.append(min(timer.repeat(7, number)) / number * 1e6)
    return found


def main() -> int:
    """Print the table, or measure one strategy for it."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return 0
    print("microseconds | " + " | ".join(WORK))
    for name in MAKE:
        done = subprocess.run([sys.executable, __file__, name], check=False, capture_output=True, text=True)
        refused = (done.stderr.strip().splitlines() or ["?"])[-1]
        cells = [f"{number:.2f}" for number in json.loads(done.stdout)] if done.returncode == 0 else [refused]
        print(" | ".join([f"{name:27}", *cells]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
