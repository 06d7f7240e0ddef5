"""`@ctxalloc.request()`: each call of a function, coroutine function or (async) generator is a request of its own."""

import asyncio
import copy
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

import ctxalloc
from ctxalloc import Budget, BudgetExceeded, current, handler_of, request

Bytes = npt.NDArray[np.uint8]


def owner(array: Bytes) -> ctxalloc.Handler:
    handler = handler_of(array)
    assert handler is not None
    return handler


def test_each_call_of_a_function_is_a_request() -> None:
    tenant = Budget(1000)

    @request(budget=tenant, strict=True)
    def work(size: int) -> Bytes:
        """Works."""
        return np.empty(size, np.uint8)

    first, second = work(300), work(400)
    assert tenant.in_use_bytes == 700
    assert owner(first) != owner(second)
    with pytest.raises(BudgetExceeded, match="'unnamed' has no room for 500 more bytes: 700 of its 1000"):
        work(500)
    assert work.__doc__ == "Works."
    assert current().name == "default_allocator"


def test_calls_of_a_coroutine_function_are_requests_side_by_side() -> None:
    @request(limit_bytes=1000, strict=True)
    async def work(size: int) -> ctxalloc.Handler:
        held = np.empty(size, np.uint8)
        await asyncio.sleep(0)
        assert current() == owner(held)
        return current()

    async def main() -> None:
        handlers = await asyncio.gather(*(work(900) for _ in range(10)))
        assert len(set(handlers)) == 10
        with pytest.raises(BudgetExceeded):
            await work(1001)

    assert inspect.iscoroutinefunction(work)
    asyncio.run(main())


def test_a_generator_is_one_request_from_its_first_step_to_its_end() -> None:
    tenant = Budget()

    @request(budget=tenant, limit_bytes=1000, strict=True)
    def chunks(count: int) -> Iterator[Bytes]:
        kept = np.empty(10, np.uint8)
        for _ in range(count):
            yield np.empty(300, np.uint8)
        assert owner(kept) == current()

    before = ctxalloc.request_metrics().begun
    arrays = []
    for array in chunks(3):
        assert current().name == "default_allocator"
        arrays.append(array)
    assert len({owner(array) for array in arrays}) == 1
    assert tenant.in_use_bytes == 900
    assert ctxalloc.request_metrics().begun == before + 1
    with pytest.raises(BudgetExceeded, match="910 of its 1000"):
        list(chunks(4))

    unstarted = chunks(1)
    assert ctxalloc.request_metrics().begun == before + 2
    unstarted.close()  # type: ignore[attr-defined]


def test_a_generator_that_is_closed_ends_its_request(collect: Callable[[], None]) -> None:
    @request()
    def forever() -> Iterator[Bytes]:
        while True:
            yield np.empty(100, np.uint8)

    collect()
    present = ctxalloc.request_metrics().present
    generator = forever()
    next(generator)
    del generator
    collect()
    assert ctxalloc.request_metrics().present <= present


def test_an_async_generator_is_one_request_too() -> None:
    @request(limit_bytes=1000, strict=True)
    async def chunks(count: int) -> AsyncIterator[Bytes]:
        for _ in range(count):
            await asyncio.sleep(0)
            yield np.empty(300, np.uint8)

    async def main() -> None:
        arrays = [array async for array in chunks(3)]
        assert len({owner(array) for array in arrays}) == 1
        assert current().name == "default_allocator"
        with pytest.raises(BudgetExceeded, match="900 of its 1000"):
            _ = [array async for array in chunks(4)]
        async for _ in chunks(3):
            break

    asyncio.run(main())


def test_classes_and_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match=r"@ctxalloc.request\(...\) decorates functions"):
        request()(int)  # type: ignore[type-var]
    with pytest.raises(TypeError):
        request()()  # type: ignore[call-arg]


def test_methods_of_all_kinds_are_decorated() -> None:
    class Service:
        @request(limit_bytes=100, strict=True)
        def plain(self) -> str:
            return current().name

        @request(limit_bytes=100, strict=True)
        @staticmethod
        def static() -> str:
            return current().name

    assert Service().plain().startswith("request ")
    assert Service.static().startswith("request ")


def test_terms_pickle_for_decorated_functions_of_other_processes() -> None:
    terms = request(limit_bytes=1000, name="there", root=True, after_end="refuse", strict=True)
    for twin in (pickle.loads(pickle.dumps(terms)), copy.copy(terms)):
        assert repr(twin) == '<ctxalloc.request(name="there"), not entered>'
        with pytest.raises(BudgetExceeded, match="'there' has no room for 1001 more bytes: 0 of its 1000"), twin:
            np.empty(1001, np.uint8)
        late: list[MemoryError] = []
        with twin_of_ended(terms) as ended:
            handler = ended.handler
        with ctxalloc.use(handler):
            try:
                np.empty(100, np.uint8)
            except MemoryError as error:
                late.append(error)
        assert late, "it refuses after its end, as its terms say"


def twin_of_ended(terms: ctxalloc.Request) -> ctxalloc.Request:
    return pickle.loads(pickle.dumps(terms))  # type: ignore[no-any-return]


@pytest.mark.parametrize("option", ["budget", "strategy"])
def test_terms_that_belong_to_this_process_do_not_pickle(option: str) -> None:
    terms = (
        request(budget=Budget(1000)) if option == "budget" else request(strategy=ctxalloc.strategies.Aligned(align=64))
    )
    with pytest.raises(TypeError, match=f"a request with {option}= cannot be pickled"):
        pickle.dumps(terms)


def test_a_request_that_was_entered_does_not_pickle() -> None:
    with request(name="mine") as scope, pytest.raises(TypeError, match="was entered, and belongs to this process"):
        pickle.dumps(scope)
    with pytest.raises(TypeError, match="was entered, and belongs to this process"):
        pickle.dumps(scope)
