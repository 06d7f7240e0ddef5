"""What arrays may expect of any strategy: their contents, their alignment, and the same after a resize."""

from collections.abc import Callable

import numpy as np
import pytest

import ctxalloc
from ctxalloc.strategies import SharedMemory

SIZES = (0, 1, 7, 63, 64, 100, 1000, 4096, 5000, 70_000, 300_000, 5 * ctxalloc.MiB)
NAMES = ["default_allocator", "system", "aligned64", "pool", "tracked", "guard", "hugepages", "locked", "shared"]


@pytest.fixture(params=NAMES)
def handler(request: pytest.FixtureRequest, fresh_name: Callable[[], str]) -> ctxalloc.Handler:
    if request.param == "shared":
        return ctxalloc.register(fresh_name(), SharedMemory())
    if request.param == "locked":
        request.getfixturevalue("may_lock")
    return ctxalloc.handler(request.param)


def test_arrays_of_every_size_keep_their_contents(handler: ctxalloc.Handler) -> None:
    with ctxalloc.use(handler):
        arrays = [np.full(size, number, np.uint8) for number, size in enumerate(SIZES * 3)]
        zeros = [np.zeros(size, np.uint8) for size in SIZES * 2]
    with ctxalloc.use("pool"):
        others = [np.full(size, 255, np.uint8) for size in SIZES]
        del others
    for number, array in enumerate(arrays):
        assert ctxalloc.handler_of(array) is handler
        assert (array == number).all()
        assert array.ctypes.data % handler.alignment == 0
    assert not any(array.any() for array in zeros)


def test_a_resize_is_by_the_arrays_own_handler_and_keeps_its_first_items(handler: ctxalloc.Handler) -> None:
    with ctxalloc.use(handler):
        array = np.arange(10)
    with ctxalloc.use("aligned64" if handler.name != "aligned64" else "system"):
        for size in (1000, 100_000, 3, 0, 1, 2_000_000, 5):
            kept = min(array.size, size)
            before = array[:kept].copy()
            array.resize(size, refcheck=False)
            assert (array[:kept] == before).all()
            assert not array[kept:].any()
            assert ctxalloc.handler_of(array) is handler
            assert array.ctypes.data % handler.alignment == 0
            array[:] = np.arange(size)
