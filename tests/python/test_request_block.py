"""``Request.__enter__`` and ``__exit__`` are made by hand from CPython's C API: they behave as any methods do."""

import gc
import inspect
import sys
from typing import Any

import numpy as np
import pytest

import ctxalloc


def test_the_methods_of_a_with_block_have_signatures() -> None:
    assert str(inspect.signature(ctxalloc.Request.__enter__)) == "(self, /)"
    assert str(inspect.signature(ctxalloc.Request.__exit__)) == "(self, kind, error, traceback, /)"
    assert ctxalloc.Request.__exit__.__qualname__ == "Request.__exit__"


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_leaving_a_request_takes_three_arguments(count: int) -> None:
    request = ctxalloc.request()
    leave: Any = request.__enter__().__exit__
    with pytest.raises(TypeError, match=f"__exit__.. takes kind, error and traceback, 3 arguments; got {count}"):
        leave(*[None] * count)
    with pytest.raises(TypeError, match="keyword"):
        leave(kind=None, error=None, traceback=None)
    assert ctxalloc.current_request() == request, "it is entered still"
    leave(None, None, None)
    assert ctxalloc.current_request() is None


def test_both_methods_want_a_request() -> None:
    enter: Any = ctxalloc.Request.__enter__
    leave: Any = ctxalloc.Request.__exit__
    for wrong in (object(), ctxalloc.use("pool"), None):
        with pytest.raises(TypeError):
            enter(wrong)
        with pytest.raises(TypeError):
            leave(wrong, None, None, None)


def test_a_request_without_options_is_as_one_with_all_of_them_none() -> None:
    names = inspect.signature(ctxalloc.request).parameters
    plain, spelt = ctxalloc.request(), ctxalloc.request(**dict.fromkeys(names))
    assert plain.__reduce__()[0].keywords == spelt.__reduce__()[0].keywords  # type: ignore[union-attr, attr-defined, index]


@pytest.mark.parametrize("fails", [False, True])
def test_a_with_block_keeps_no_reference(fails: bool) -> None:
    tenant = ctxalloc.Budget(1 << 20)
    error = ValueError("the block's")

    def once() -> None:
        try:
            with ctxalloc.request(limit_bytes=1000, name="block", budget=tenant) as request:
                assert request.name == "block"
                if fails:
                    raise error
        except ValueError as caught:
            caught.__traceback__ = None

    once()
    gc.collect()
    watched = (error, tenant, None, ctxalloc.Request)
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(1000):
        once()
    gc.collect()
    after = [sys.getrefcount(each) for each in watched]
    assert all(abs(now - then) < 100 for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("selecting", [lambda: ctxalloc.use("pool"), ctxalloc.request])
def test_blocks_at_hand_are_zeroed_where_zeros_are_wanted(selecting: Any) -> None:
    with selecting():
        for size in (0, 1, 64, 1000, 4096, 1 << 18, (1 << 18) + 1):
            dirty = np.full(size, 0xAB, np.uint8)
            del dirty
            assert not np.zeros(size, np.uint8).any()
