"""A handler is reset while others look at what is selected: finalizers of garbage, or who asks whose a block is."""

import pytest
import subprocesses
from whole_programs import check, needs_library

pytestmark = pytest.mark.any_numpy

# Before CPython 3.12 a `reset` makes objects before it takes the variable away, and each may have garbage collected.
PROGRAM = """
import contextvars, gc, sys
import numpy as np
import ctxalloc

class Finalized:
    def __init__(self):
        self.itself = self  # only the collector frees it
    def __del__(self):
        if {uses}:
            with ctxalloc.use("system"):
                np.empty(100)
        else:
            np.empty(100)  # NumPy reads its variable, which keeps what it found

# With several variables there is a tree to copy.
variables = [contextvars.ContextVar(str(number)) for number in range(3)]
for variable in variables:
    variable.set(variable)

def block():
    with ctxalloc.request(limit_bytes=1 << 20) as request:
        gc.disable()
        gc.set_threshold(1, 1, 1)
        for _ in range(50):
            Finalized()
        gc.enable()
    gc.set_threshold(700, 10, 10)
    assert ctxalloc.current().name == "default_allocator", ctxalloc.current()
    assert np.zeros(10 << 20).nbytes == 80 << 20, "it is refused by a request that has ended"
    assert gc.isenabled()

for _ in range(300):
    block()
print("all")
"""


@pytest.mark.parametrize("way", ["contextvar", "contextvar-methods", "sethandler"])
@pytest.mark.parametrize("uses", [False, True], ids=["makes an array", "uses a handler"])
def test_a_finalizer_within_a_reset_leaves_nothing_selected(way: str, *, uses: bool) -> None:
    assert subprocesses.says(PROGRAM.format(uses=uses), CTXALLOC_SELECTION=way) == "all"


@needs_library
def test_whose_a_block_is_may_be_asked_while_others_reset_the_variable() -> None:
    """What asks must not have the variable keep what is being taken away: a foreign `reset` makes memory first."""
    check("""
        variables = [contextvars.ContextVar(str(number)) for number in range(5)]
        def work():
            for variable in variables:
                variable.set(variable)
            with ctxalloc.use("pool"):
                [numpys] = [variable for variable in contextvars.copy_context() if variable not in variables]
            capsule = ctxalloc.handler("pool").capsule
            for number in range(20_000):
                numpys.reset(numpys.set(capsule))
                assert ctxalloc.current().name == "default_allocator", number
        with ctxalloc.request(whole=True):
            kept = bytearray(2000)
            threading.excepthook = lambda failed: failures.append(failed.exc_value)
            failures = []
            # CPython 3.14 may be told to start threads with their starter's context.
            thread = threading.Thread(target=contextvars.Context().run, args=(work,))
            thread.start()
            thread.join()
        assert not failures, failures
    """)
