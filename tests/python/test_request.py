"""`ctxalloc.request()` as a context manager: what it selects, counts and says; and how it is entered and left."""

import asyncio
import contextvars
from collections.abc import Callable

import numpy as np
import pytest

import ctxalloc
from ctxalloc import current, handler_of, request
from ctxalloc.strategies import Aligned, Pool, Tracked


def escaped(scope: ctxalloc.Request) -> ctxalloc.Escaped:
    assert scope.escaped is not None
    return scope.escaped


def test_a_request_selects_a_handler_of_its_own() -> None:
    with request() as scope:
        assert current() == scope.handler
        inside = np.ones(1000)
        assert handler_of(inside) == scope.handler
        assert ctxalloc.get_handler_name(inside) == ctxalloc.get_handler_name() == scope.handler.name
        with request() as inner:
            assert inner.handler != scope.handler
            assert current() == inner.handler
        assert current() == scope.handler
        name = scope.handler.name
    assert current().name == "default_allocator"
    owner = handler_of(inside[::2])
    assert owner is not None
    assert owner.name == ctxalloc.get_handler_name(inside) == name


def test_the_handlers_of_requests_are_compared_by_what_they_are() -> None:
    with request() as scope, request() as inner:
        assert scope.handler == scope.handler != inner.handler
        assert len({scope.handler, scope.handler, inner.handler}) == 2
        assert scope.handler != scope.handler.name
        assert scope.handler.capsule is not inner.handler.capsule


def test_numbers_are_those_of_its_arrays_during_and_after() -> None:
    with request() as scope:
        assert scope.stats == request_stats()
        first = np.empty(1000, np.uint8)
        second = np.zeros(500, np.uint8)
        assert scope.stats == request_stats(1500, 2, 1500, 1500, 2)
        del first
        assert scope.stats == request_stats(500, 1, 1500, 1500, 2)
        second.resize(2000, refcheck=False)
        assert scope.stats == request_stats(2000, 1, 2000, 3000, 2)
        stats = scope.stats
    assert scope.stats == stats
    assert hash(scope.stats) == hash(stats)
    assert repr(stats) == (
        "Stats(live_bytes=2000, live_blocks=1, peak_bytes=2000, total_bytes=3000, count=2, refused=0, "
        "overdraft_bytes=0)"
    )
    with pytest.raises(AttributeError):
        stats.live_bytes = 1  # type: ignore[misc]
    del second
    assert scope.stats == request_stats(0, 0, 2000, 3000, 2)


class request_stats:  # noqa: N801 - it stands for a Stats
    """Equal to the Stats that has these numbers."""

    def __init__(self, live_bytes: int = 0, live: int = 0, peak: int = 0, total: int = 0, count: int = 0) -> None:
        self.numbers = (live_bytes, live, peak, total, count)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, ctxalloc.Stats)
        found = (other.live_bytes, other.live_blocks, other.peak_bytes, other.total_bytes, other.count)
        return found == self.numbers

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Stats{self.numbers}"


def test_what_escaped_is_told_after_the_end_only() -> None:
    with request() as scope:
        assert scope.escaped is None
        kept = np.ones(100)
        np.ones(1000)
    assert (escaped(scope).count, escaped(scope).bytes, escaped(scope).blocks) == (1, 800, None)
    assert repr(escaped(scope)) == "<ctxalloc.Escaped: 1 blocks, 800 bytes>"
    assert kept.sum() == 100
    with request() as scope:
        pass
    assert escaped(scope).count == 0


def test_a_tracked_request_says_where_its_escapes_were_made() -> None:
    with request(strategy=Tracked(Pool(), traceback=2)) as scope:
        kept = np.ones(100)
        assert [block.size_bytes for block in scope.handler.live_blocks()] == [800]
    assert escaped(scope).blocks is not None
    (block,) = escaped(scope).blocks
    assert (block.size_bytes, block.address) == (800, kept.ctypes.data)
    assert test_a_tracked_request_says_where_its_escapes_were_made.__name__ in {frame.name for frame in block.traceback}
    del kept
    assert escaped(scope).blocks == [block]


def test_a_strategy_serves_the_request_and_may_be_shared_by_many() -> None:
    page = Aligned(align=4096)
    arrays = []
    for _ in range(3):
        with request(strategy=page) as scope:
            arrays.append(np.ones(1000))
            assert scope.stats.live_blocks == 1
    assert np.sum(arrays) == 3000


def test_names_are_given_or_numbers() -> None:
    with request(name="thumbnail") as scope:
        assert scope.name == scope.budget.name == "thumbnail"
        assert repr(scope) == '<ctxalloc.request(name="thumbnail"), entered>'
    with request() as first, request() as second:
        assert first.name.startswith("request ")
        assert first.name != second.name
    assert repr(first) == "<ctxalloc.request(), left>"
    assert repr(request()) == "<ctxalloc.request(), not entered>"


def test_an_exception_passes_through_and_the_request_ends() -> None:
    with pytest.raises(ZeroDivisionError), request() as scope:
        raise ZeroDivisionError
    assert escaped(scope).count == 0
    assert current().name == "default_allocator"


def test_a_request_is_for_one_block() -> None:
    scope = request(name="once")
    with scope:
        with pytest.raises(RuntimeError, match=r'request\(name="once"\) is entered already; call request\(\) again'):
            scope.__enter__()
        assert current() == scope.handler
    with pytest.raises(RuntimeError, match=r"for one block; call request\(\) again"):
        scope.__enter__()
    assert current().name == "default_allocator"
    with pytest.raises(RuntimeError, match="is not entered, so there is nothing to leave"):
        scope.__exit__(None, None, None)


def test_before_it_is_entered_there_is_nothing_to_tell() -> None:
    scope = request()
    for name in ("name", "handler", "budget", "stats"):
        with pytest.raises(RuntimeError, match="is not entered yet, so there is nothing to tell"):
            getattr(scope, name)
    assert scope.escaped is None
    with pytest.raises(RuntimeError, match="not entered, so there is nothing to leave"):
        scope.__exit__(None, None, None)
    with scope:
        pass
    with pytest.raises(RuntimeError, match=r"has ended and nothing of it is left"):
        scope.handler  # noqa: B018


def test_left_in_another_context_it_goes_on_in_its_own() -> None:
    scope = request()
    with scope:
        with pytest.raises(ValueError, match=r"request\(\) was entered in another Context"):
            contextvars.Context().run(scope.__exit__, None, None, None)
        assert current() == scope.handler
        assert scope.escaped is None
    assert scope.escaped is not None


def test_requests_left_out_of_order_restore_what_each_saved() -> None:
    outer, inner = request(), request()
    outer.__enter__()
    inner.__enter__()
    handler = outer.handler
    outer.__exit__(None, None, None)
    assert current().name == "default_allocator"
    inner.__exit__(None, None, None)
    assert current() == handler  # as contextvars has it; the request is over
    kept = np.ones(10)
    assert outer.stats.live_blocks >= 1  # and what comes late is charged to it
    ctxalloc.set_handler(None)
    del kept
    assert outer.stats.live_blocks == 0


def test_an_async_block_selects_across_awaits_and_keeps_tasks_apart() -> None:
    async def one(size: int) -> tuple[ctxalloc.Request, int]:
        async with request() as scope:
            held = []
            for _ in range(5):
                held.append(np.empty(size, np.uint8))
                await asyncio.sleep(0)
                assert current() == scope.handler
            assert all(handler_of(array) == scope.handler for array in held)
            assert scope.stats.live_bytes == 5 * size
        assert escaped(scope).count == 5
        del held
        return scope, size

    async def main() -> None:
        for scope, size in await asyncio.gather(*map(one, range(1000, 1020))):
            assert scope.stats == request_stats(0, 0, 5 * size, 5 * size, 5)
            assert escaped(scope).count == 0  # the loop has had its turn

    asyncio.run(main())


def test_async_entering_happens_where_it_is_awaited_and_twice_is_refused() -> None:
    async def main() -> None:
        scope = request()
        entry = scope.__aenter__()
        assert current().name == "default_allocator"
        assert await entry is scope
        assert current() == scope.handler
        with pytest.raises(RuntimeError, match="entered already"):
            await scope.__aenter__()
        await scope.__aexit__(None, None, None)
        assert current().name == "default_allocator"

    asyncio.run(main())


BAD = [
    ({"limit_bytes": -1}, ValueError, r"request\(limit_bytes=-1\): give a number of bytes"),
    ({"limit_bytes": 1 << 70}, ValueError, r"give a number of bytes, an int from 0 to"),
    ({"limit_bytes": "many"}, TypeError, r"request\(limit_bytes='many'\)"),
    ({"limit_bytes": 1.5}, TypeError, r"request\(limit_bytes=1.5\)"),
    ({"strategy": "pool"}, TypeError, r"request\(strategy='pool'\): give one of ctxalloc.strategies"),
    ({"name": 3}, TypeError, r"request\(name=3\): give a str"),
    ({"budget": 1000}, TypeError, r"request\(budget=1000\): give a ctxalloc.Budget"),
    ({"limit": 1000}, TypeError, "limit"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD)
def test_what_is_not_as_it_must_be_is_refused_at_the_call(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    before = ctxalloc.request_metrics()
    with pytest.raises(error, match=words):
        request(**options)  # type: ignore[arg-type]
    assert ctxalloc.request_metrics() == before


def test_keyword_options_only_and_made_by_the_function_only() -> None:
    with pytest.raises(TypeError):
        request(1000)  # type: ignore[call-arg]
    for kind in (ctxalloc.Request, ctxalloc.Stats, ctxalloc.Escaped):
        with pytest.raises(TypeError):
            kind()


def test_a_request_that_is_never_left_ends_with_its_object(collect: Callable[[], None]) -> None:
    before = ctxalloc.request_metrics().present

    def opens() -> None:
        request().__enter__()

    contextvars.Context().run(opens)
    collect()
    assert ctxalloc.request_metrics().present <= before


def test_requests_in_reference_cycles_are_collected(collect: Callable[[], None]) -> None:
    cell: contextvars.ContextVar[object] = contextvars.ContextVar("cell")

    def cycle() -> None:
        scope = request()
        scope.__enter__()
        cell.set(scope)  # the token refers to the Context, which refers to the scope

    collect()
    before = ctxalloc.request_metrics().present
    contextvars.Context().run(cycle)
    collect()
    assert ctxalloc.request_metrics().present <= before
