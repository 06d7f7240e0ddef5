"""What C sees of blocks: the event hook and tracemalloc, with extensions that know nothing of Rust."""

import tracemalloc
from collections.abc import Callable
from types import ModuleType

import c_extensions
import numpy as np
import pytest
from numpy_c import ForeignHandler, set_handler
from subprocesses import says

import ctxalloc
import ctxalloc_example as example

pytestmark = [
    pytest.mark.skipif(not c_extensions.compiler(), reason="there is no C compiler"),
    pytest.mark.usefixtures("all_is_in_order"),
]


# ---- the event hook


@pytest.mark.parametrize("name", ["pool", "headed, final", "headed, first draft"])
def test_the_hook_hears_of_every_array(draft2: ModuleType, draft1: ModuleType, name: str) -> None:
    draft1.push(1)
    draft1.pop()
    with ctxalloc.use(name):
        assert draft2.set_hook(False) == (False, False)
        array = np.empty(5000, dtype=np.uint8)
        zeros = np.zeros(3000, dtype=np.uint8)
        array.resize(7000, refcheck=False)
        del array, zeros
        events = draft2.events()
        assert draft2.end_hook()
    assert events == {"new": 2, "renew": 1, "free": 2, "inside": 0, "bytes": 15_000}
    assert draft2.events() == events
    np.ones(10)
    assert draft2.events() == events, "the hook is gone"


def test_the_hook_hears_of_requests_and_of_what_is_adopted_meanwhile(
    draft2: ModuleType, fresh_name: Callable[[], str]
) -> None:
    foreign = ForeignHandler(fresh_name())
    draft2.set_hook(False)
    try:
        with ctxalloc.request():
            array = np.empty(5000, dtype=np.uint8)
            del array
        assert draft2.events()["new"] == draft2.events()["free"] == 1
        old = set_handler(foreign.capsule)
        ctxalloc.current()  # adopted on sight
        array = np.empty(5000, dtype=np.uint8)
        del array
        set_handler(old)
        assert draft2.events()["new"] == draft2.events()["free"] == 2
    finally:
        draft2.end_hook()


def test_the_hook_does_not_hear_itself(draft2: ModuleType) -> None:
    with ctxalloc.use("pool"):
        assert draft2.set_hook(True) == (False, False)
        try:
            array = np.empty(5000, dtype=np.uint8)
            del array
            assert draft2.events() == {"new": 1, "renew": 0, "free": 1, "inside": 2, "bytes": 5000}
        finally:
            draft2.end_hook()


def test_the_hook_hears_of_buffers_that_threads_without_python_make(draft2: ModuleType) -> None:
    draft2.set_hook(False)
    try:
        with ctxalloc.use("system"):
            assert example.buffers_on_threads(4, 100) == 400
        events = draft2.events()
    finally:
        draft2.end_hook()
    assert (events["new"], events["free"]) == (400, 400)


# ---- tracemalloc


def bytes_in(domain: int) -> int:
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(inclusive=True, domain=domain)])
    return sum(trace.size for trace in snapshot.traces)


NUMPYS_DOMAIN = 389_047


@pytest.mark.parametrize("name", ["headed, final", "headed, first draft"])
def test_tracemalloc_counts_arrays_once_in_numpys_domain(draft1: ModuleType, name: str) -> None:
    draft1.push(1)
    draft1.pop()
    tracemalloc.start()
    try:
        before = bytes_in(NUMPYS_DOMAIN), bytes_in(ctxalloc.tracemalloc_domain)
        with ctxalloc.use(name):
            array = np.empty(1_000_000, dtype=np.uint8)
        assert bytes_in(NUMPYS_DOMAIN) - before[0] == 1_000_000
        del array
        assert (bytes_in(NUMPYS_DOMAIN), bytes_in(ctxalloc.tracemalloc_domain)) == before
    finally:
        tracemalloc.stop()


def test_tracemalloc_counts_buffers_and_blocks_of_c_in_our_domain() -> None:
    tracemalloc.start()
    try:
        before = bytes_in(NUMPYS_DOMAIN), bytes_in(ctxalloc.tracemalloc_domain)
        kept = example.KeptBuffer(123_456)
        assert bytes_in(ctxalloc.tracemalloc_domain) - before[1] == 123_456
        kept.resize(1_000_000)
        assert bytes_in(ctxalloc.tracemalloc_domain) - before[1] == 1_000_000
        assert bytes_in(NUMPYS_DOMAIN) == before[0]
        del kept
        block = c_extensions.api().new(5000)
        assert bytes_in(ctxalloc.tracemalloc_domain) - before[1] == 5000
        c_extensions.api().free(block)
        assert (bytes_in(NUMPYS_DOMAIN), bytes_in(ctxalloc.tracemalloc_domain)) == before
    finally:
        tracemalloc.stop()


def test_a_buffer_from_before_tracing_does_no_harm() -> None:
    kept = example.KeptBuffer(10_000)
    tracemalloc.start()
    try:
        del kept
        assert bytes_in(ctxalloc.tracemalloc_domain) == 0
        kept = example.KeptBuffer(10_000)
    finally:
        tracemalloc.stop()
    del kept


def test_tracing_from_the_start_is_seen_too() -> None:
    program = """
import tracemalloc, ctxalloc, ctxalloc_example
kept = ctxalloc_example.KeptBuffer(5000)
only = tracemalloc.DomainFilter(inclusive=True, domain=ctxalloc.tracemalloc_domain)
print(sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([only]).traces))
"""
    assert says(program, "-X", "tracemalloc") == "5000"
