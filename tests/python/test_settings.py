"""What is set once for the process: by `configure`, by the environment; and what is given back."""

import re

import pytest
import subprocesses

RSS = """
import os, time, numpy as np, ctxalloc
from resident import rss
def comes_back_to(before, meanwhile=lambda: None):
    nap, waited = 0.02, 0.0
    while rss() > before * 1.2:
        assert waited < 1 + 5, (before >> 20, rss() >> 20)  # decay, and what the promise has beyond it
        meanwhile()
        begun = time.monotonic()
        time.sleep(nap)
        # Where this thread oversleeps, the one that gives memory back does so too: that does not count.
        waited += min(time.monotonic() - begun, 2 * nap)
"""


@pytest.mark.once
def test_memory_of_a_burst_comes_back() -> None:
    program = f"""{RSS}
ctxalloc.configure(decay_seconds=1)
with ctxalloc.use("pool"):
    np.ones(100_000)
    before = rss()
    arrays = [np.ones(100_000) for _ in range(300)]  # all alive: nothing goes back, however long this takes
    assert rss() > before + 200 * ctxalloc.MiB
    del arrays
    comes_back_to(before)
print("back")
"""
    assert subprocesses.says(program) == "back"


def test_trim_gives_back_what_is_kept_and_says_how_much() -> None:
    program = f"""{RSS}
with ctxalloc.use("pool"):
    np.ones(100_000)
    before = rss()
    arrays = [np.ones(100_000) for _ in range(100)]
    del arrays
    kept = rss()
    given = ctxalloc.trim()
    assert given >= 80_000_000 - ctxalloc.MiB, given
    assert rss() < before * 1.2
    assert ctxalloc.trim() < ctxalloc.MiB
print("given")
"""
    assert subprocesses.says(program) == "given"


CANNOT_BE = {
    "decay_seconds=-1": ValueError,
    "decay_seconds=float('nan')": ValueError,
    "decay_seconds=float('inf')": ValueError,
    "decay_seconds=True": TypeError,
    "decay_seconds='1'": TypeError,
    "warm_bytes=-1": ValueError,
    "warm_bytes=1.5": TypeError,
    "warm_bytes=False": TypeError,
    "warm_bytes='1 MiB'": TypeError,
    "kept_bytes=1": TypeError,
}


def test_what_cannot_be_is_refused_and_named() -> None:
    program = f"""
import ctxalloc
for option in {list(CANNOT_BE)}:
    try:
        eval(f"ctxalloc.configure({{option}})")
    except Exception as error:
        print(option, type(error).__name__, str(error).replace("\\n", " "), sep="|")
    else:
        print(option, "taken", "", sep="|")
"""
    said = [line.split("|", 2) for line in subprocesses.says(program).splitlines()]
    assert [option for option, _, _ in said] == list(CANNOT_BE)
    for option, kind, message in said:
        assert kind == CANNOT_BE[option].__name__, option
        assert option.partition("=")[0] in message


def test_a_decay_of_any_length_is_taken() -> None:
    program = """
import ctxalloc, numpy as np
ctxalloc.configure(decay_seconds=1e300)
with ctxalloc.use("pool"):
    array = np.ones(10)
print("taken")
"""
    assert subprocesses.says(program) == "taken"


def test_it_is_too_late_once_a_pool_has_handed_out_memory() -> None:
    program = """
import ctxalloc, numpy as np
ctxalloc.configure(decay_seconds=2)
ctxalloc.configure(warm_bytes=0)  # the last call counts
with ctxalloc.use("pool"):
    array = np.ones(10)
try:
    ctxalloc.configure(decay_seconds=3)
except RuntimeError as error:
    print(error)
"""
    assert "CTXALLOC_DECAY_SECONDS" in subprocesses.says(program)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CTXALLOC_DECAY_SECONDS", "-1"),
        ("CTXALLOC_WARM_BYTES", "64M"),
        ("CTXALLOC_HANDLER", "no such handler"),
        ("CTXALLOC_RECORD_ONE_IN", "0"),
        ("CTXALLOC_METRICS_DIR", "/no/such/folder"),
    ],
)
def test_a_bad_value_in_the_environment_is_an_import_error_that_names_it(name: str, value: str) -> None:
    outcome = subprocesses.run("import ctxalloc", **{name: value})
    assert outcome.code == 1
    last = outcome.err.strip().splitlines()[-1]
    assert re.match(r"ImportError: .*" + name, last), outcome.err
    assert value in last
    if name == "CTXALLOC_HANDLER":
        assert "aligned64, pool" in last, "the known ones are listed"


def test_the_environment_selects_a_handler_in_the_context_that_imports() -> None:
    program = """
import numpy as np, threading
import ctxalloc
print(ctxalloc.current().name, ctxalloc.handler_of(np.ones(3)).name)
"""
    assert subprocesses.says(program, CTXALLOC_HANDLER="pool") == "pool pool"
    assert subprocesses.says(program, CTXALLOC_HANDLER="") == "default_allocator default_allocator"


def test_fork_does_not_warn_of_the_thread_that_gives_memory_back() -> None:
    program = f"""{RSS}
ctxalloc.configure(decay_seconds=1)
with ctxalloc.use("pool"):
    np.ones(100_000)
    before = rss()
    arrays = [np.ones(100_000) for _ in range(100)]
    del arrays
    child = os.fork()
    if child == 0:
        comes_back = [np.ones(100_000) for _ in range(10)]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    comes_back_to(before)
print("back")
"""
    assert subprocesses.says(program) == "back"
