"""What the tests here share. They need a SYCL runtime (`make test-usm`): they fail where there is none."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dpctl  # noqa: F401  # the tests are of no use without it
import numpy as np
import pytest

import ctxalloc
from ctxalloc import _native, usm

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

KINDS = ("host", "shared", "device")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a handler selected, or a block alive."""
    usm.empty(1)  # the handlers are there
    gc.collect()
    before = _native.UsmMemory.live()
    assert ctxalloc.current().name == "default_allocator"
    yield
    for _ in range(3):
        gc.collect()
    assert ctxalloc.current().name == "default_allocator"
    assert _native.UsmMemory.live() == before, "a block is alive"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of USM."""
    return str(request.param)


@pytest.fixture
def shared() -> Callable[..., np.ndarray]:
    """Makes an ndarray in USM."""

    def make(shape: tuple[int, ...] = (3, 4), dtype: object = float) -> np.ndarray:
        with usm.use():
            return np.arange(int(np.prod(shape))).astype(dtype).reshape(shape).copy()

    return make
