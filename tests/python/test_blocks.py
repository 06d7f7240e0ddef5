"""A block belongs to the handler that made it: on other threads, refused, pickled. Contents: test_every_strategy.py."""

import gc
import io
import pickle
import queue
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from built_in import HANDLERS
from numpy_c import ForeignHandler

import ctxalloc
from ctxalloc import handler_of, use

SIZES = [0, 1, 7, 8, 63, 64, 100, 1000, 1024, 4096, 65_537, 1 << 20]


def test_a_refused_resize_leaves_the_array_as_it_was() -> None:
    for name in HANDLERS:
        with use(name) as handler:
            array = np.arange(10)
        view = array[2:]
        with pytest.raises(ValueError, match="cannot resize an array that"):
            array.resize(20)
        with pytest.raises(MemoryError):
            array.resize(1 << 58, refcheck=False)
        assert view.tolist() == list(range(2, 10))
        assert handler_of(array) is handler
        array.resize(20, refcheck=False)
        del view
        assert array.tolist() == [*range(10), *[0] * 10]


def test_a_failed_allocation_is_a_memory_error_and_the_next_one_works() -> None:
    for name in HANDLERS:
        with use(name) as handler:
            for make in (np.empty, np.zeros):
                with pytest.raises(MemoryError, match="Unable to allocate"):
                    make(1 << 60, np.uint8)
            assert handler_of(np.ones(10)) is handler


@pytest.mark.parametrize("name", HANDLERS)
def test_blocks_may_be_freed_and_resized_on_any_thread(name: str) -> None:
    handed: queue.SimpleQueue[Any] = queue.SimpleQueue()
    back: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        while (array := handed.get()) is not None:
            assert (array == array.size % 251).all()
            array.resize(array.size + 1000, refcheck=False)
            array[:] = array.size % 251
            back.put(array)
            del array

    thread = threading.Thread(target=work)
    thread.start()
    with use(name) as handler:
        for size in SIZES[1:] * 3:
            handed.put(np.full(size, size % 251, np.uint8))
            array = back.get()
            assert (array == (size + 1000) % 251).all()
            assert handler_of(array) is handler
    handed.put(None)
    thread.join()


def test_pickles_and_files_do_not_carry_handlers(tmp_path: Any) -> None:
    with use("aligned64"):
        array = np.arange(1000).reshape(10, 100)
        small = array[:, :10].copy()
        pickled = [pickle.dumps(small, protocol) for protocol in (2, 3, 4)]
        large = [pickle.dumps(array, 4), pickle.dumps(array, 5), pickle.dumps(small, 5)]
        np.save(tmp_path / "saved.npy", array)
        np.savez(tmp_path / "saved.npz", array=array)
        buffers: list[pickle.PickleBuffer] = []
        out_of_band = pickle.dumps(array, 5, buffer_callback=buffers.append)
    with use("system") as system:
        with np.load(tmp_path / "saved.npz") as archive:
            loaded = [archive["array"], np.load(tmp_path / "saved.npy")]
        loaded += map(pickle.loads, pickled)
        mapped = np.load(tmp_path / "saved.npy", mmap_mode="r")
        in_place = pickle.loads(out_of_band, buffers=buffers)
        within_bytes = list(map(pickle.loads, large))
    for copy in loaded:
        assert (copy == array[:, : copy.shape[1]]).all()
        assert handler_of(copy) is system
    assert handler_of(mapped) is None
    # Above 1000 bytes, and always in protocol 5, NumPy leaves the items in the bytes that pickle read.
    assert [handler_of(copy) for copy in within_bytes] == [None] * len(large)
    assert handler_of(in_place) is ctxalloc.handler("aligned64")  # the very bytes of `array`
    assert np.shares_memory(in_place, array)
    with use("system"):
        text = io.BytesIO(b"1 2 3\n4 5 6\n")
        assert handler_of(np.loadtxt(text)) is system


def test_objects_in_an_array_are_let_go_with_it(collect: Callable[[], None]) -> None:
    class Thing:
        pass

    for name in HANDLERS:
        with use(name):
            thing = Thing()
            alive = weakref.ref(thing)
            array = np.array([thing] * 100, dtype=object)
            copy = np.resize(array, 500)
        del thing, array, copy
        collect()
        assert alive() is None


def test_every_block_goes_back_to_the_handler_that_made_it(fresh_name: Callable[[], str]) -> None:
    # The handler checks each block that comes back against the ones it made.
    foreign = ForeignHandler(fresh_name())
    ctxalloc.adopt(foreign.capsule)
    kept: list[np.ndarray] = []
    for name in HANDLERS:
        with foreign.selected():
            inside = [np.ones(size) for size in SIZES]
            with use(name):
                kept += [array * 2 for array in inside]
            array = inside.pop()
            del inside
            array.resize(3, refcheck=False)
            kept.append(array)
            del array
    del kept
    gc.collect()
    assert foreign.live == {}
    made = foreign.calls.count("malloc") + foreign.calls.count("calloc")
    assert foreign.calls.count("free") == made


# ---- tracemalloc -------------------------------------------------------------------------------------

NUMPYS_DOMAIN = 389047
ANY_DOMAIN = tracemalloc.DomainFilter(inclusive=False, domain=-1)


def traced_bytes(at_least: int) -> list[int]:
    """The sizes of large traced blocks, in whatever domain."""
    traces = tracemalloc.take_snapshot().filter_traces([ANY_DOMAIN]).traces
    return sorted(trace.size for trace in traces if trace.size >= at_least)


@pytest.mark.parametrize("name", ["default_allocator", "pool"])
def test_tracemalloc_sees_each_array_once_and_sees_it_go(name: str) -> None:
    size = 3_000_000
    tracemalloc.start()
    try:
        with use(name):
            arrays = [np.empty(size, np.uint8), np.zeros(size + 1, np.uint8)]
        assert traced_bytes(size) == [size, size + 1]
        view = arrays[0][10:]
        assert traced_bytes(size) == [size, size + 1]
        arrays[1].resize(size * 2, refcheck=False)
        assert traced_bytes(size) == [size, size * 2]
        domains = {trace.domain for trace in tracemalloc.take_snapshot().traces if trace.size >= size}
        assert domains == {NUMPYS_DOMAIN}
        del arrays, view
        assert traced_bytes(size) == []
    finally:
        tracemalloc.stop()
