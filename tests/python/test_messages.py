"""What is said of a wrong argument: which function, which parameter, what it takes, and what it got."""

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import ctxalloc
from ctxalloc import strategies, tracking

POOL: Any = ctxalloc.handler("pool")
# Wrong on purpose, so unknown to the type checker.
register: Any = ctxalloc.register
handler: Any = ctxalloc.handler
reset: Any = ctxalloc.reset
report: Any = tracking.report
adopt: Any = ctxalloc.adopt
S: Any = strategies
wrap: Any = ctxalloc.wrap


class AsyncCallable:
    async def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return "an AsyncCallable"


class SyncMade:
    """Instances are coroutine functions; the class itself is a plain callable."""

    async def __call__(self) -> None: ...


def refused_by_none(error: Exception) -> None:
    raise error


SAID: list[tuple[Callable[[], object], type[Exception], str]] = [
    # a class, where one of its instances is wanted
    (
        lambda: register("q", S.Pool),
        TypeError,
        'register() takes a strategy, and strategies.Pool is the class of them: register("q", strategies.Pool(...))',
    ),
    (
        lambda: S.Tracked(S.Pool),
        TypeError,
        (
            "Tracked(upstream=<class 'ctxalloc.strategies.Pool'>): give a strategy to wrap, strategies.Pool(...), "
            "and not the class"
        ),
    ),
    # the function and the parameter
    (
        lambda: register("q", 5),
        TypeError,
        "register() takes a strategy of ctxalloc.strategies after the name, got 'int'",
    ),
    (
        lambda: register(5, S.Pool()),
        TypeError,
        "register() takes the handler's name, a str, before its strategy, got 'int'",
    ),
    (lambda: handler(5), TypeError, "handler() takes the name of a handler, a str, got 'int'"),
    (lambda: reset(5), TypeError, "reset() takes the Token that set_handler() returned, got 'int'"),
    (
        lambda: report(5),
        TypeError,
        "tracking.report() takes a list of blocks, as Handler.live_blocks() makes it, got 'int'",
    ),
    (lambda: report([5]), TypeError, "tracking.report() takes a list of nothing but tracking.Block, got 'int'"),
    (lambda: adopt(POOL.capsule, name=5), TypeError, "adopt() takes name=, a str or None, got 'int'"),
    # one of two
    (
        lambda: S.Faulty(S.Pool(), every=2, probability=0.5),
        TypeError,
        "Faulty() takes either every= or probability=, and was given both; leave one out",
    ),
    (lambda: S.Faulty(S.Pool()), TypeError, "Faulty() needs either every= or probability=; give one of them"),
    # what is ours is not called foreign
    (
        lambda: adopt(POOL.capsule, name="x"),
        ctxalloc.RegistrationError,
        "this handler is in the table already as 'pool'; use that one",
    ),
    # a range
    (
        lambda: S.Budgeted(S.Pool(), limit_bytes=2**64),
        ValueError,
        "Budgeted(limit_bytes=18446744073709551616): give a number of bytes, an int from 0 to 2**64 - 1",
    ),
    # Python's words for a strategy
    (
        lambda: S.Tracked(S.Tracked()),
        ValueError,
        (
            "upstream=Tracked(upstream=Pool(source=PrivatePages)) is not possible; give a strategy that is not tracked"
            ": its own list would be out of reach behind this one's"
        ),
    ),
    (
        lambda: wrap(5),
        TypeError,
        "ctxalloc.wrap(5): give a function or another callable",
    ),
    (
        lambda: wrap(None),
        TypeError,
        "ctxalloc.wrap(None): give a function or another callable",
    ),
    (
        lambda: wrap(AsyncCallable()),
        TypeError,
        (
            "ctxalloc.wrap(an AsyncCallable): wrap plain functions; tasks carry the context by themselves, and "
            "generators run in that of their caller"
        ),
    ),
    (
        lambda: ctxalloc.ThreadPoolExecutor(initializer=ctxalloc.set_handler, initargs=("pool",)),
        ValueError,
        "ctxalloc.ThreadPoolExecutor(initializer=ctxalloc.set_handler) would select nothing: ",
    ),
    # a limit that there is not
    (
        lambda: refused_by_none(ctxalloc.BudgetExceeded("b", 2**64 - 1, 3, 7)),
        ctxalloc.BudgetExceeded,
        (
            "budget 'b' has no limit, but cannot count 7 more bytes: with the 3 in use the sum would be more "
            "than can be counted; ask for less"
        ),
    ),
    # one line, whatever is in it
    (
        lambda: handler("a\0b\nc"),
        ctxalloc.UnknownHandlerError,
        "no handler is named 'a\\0b\\nc'; registered are: ",
    ),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), SAID, ids=[message[:40] for _, _, message in SAID])
def test_a_message_names_the_function_the_argument_and_what_is_wanted(
    wrong: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert str(caught.value).startswith(message)
    if not message.endswith(": "):
        assert str(caught.value) == message


def test_a_class_can_be_wrapped_whatever_its_instances_are() -> None:
    assert isinstance(wrap(SyncMade)(), SyncMade)


def test_the_running_request_is_not_entered_again() -> None:
    with ctxalloc.request(name="open"):
        again = ctxalloc.current_request()
        assert again is not None
        with pytest.raises(RuntimeError, match=r"^ctxalloc\.request\(name=\"open\"\) comes from current_request\(\)"):
            again.__enter__()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: S.Aligned(align=True),
        lambda: S.Pool(warm_bytes=False),
        lambda: S.Pool(decay_seconds=True),
        lambda: S.Budgeted(S.Pool(), limit_bytes=True),
        lambda: S.Faulty(S.Pool(), every=True),
        lambda: S.Faulty(S.Pool(), probability=True),
        lambda: S.Numa(node=True),
        lambda: S.Numa(node=[False]),
        lambda: S.Tracked(traceback=True),
        lambda: S.Guard(quarantine_bytes=True),
        lambda: S.Callbacks(malloc=True, calloc=1, realloc=1, free=1),
        lambda: S.Callbacks(malloc=1, calloc=1, realloc=1, free=1, ctx=True),
    ],
)
def test_true_is_no_number(wrong: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"=(True|False|\[False\])\): give"):
        wrong()


Malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
Calloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
Realloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def test_callbacks_that_nobody_registered_leave_nothing_behind(fresh_name: Callable[[], str]) -> None:
    def one() -> tuple[strategies.Strategy, "weakref.ref[Any]"]:
        def malloc(_ctx: int, _size: int) -> None:
            return None

        functions = Malloc(malloc), Calloc(lambda *_: None), Realloc(lambda *_: None), Free(lambda *_: None)
        strategy = strategies.Callbacks(
            malloc=functions[0], calloc=functions[1], realloc=functions[2], free=functions[3]
        )
        return strategy, weakref.ref(malloc)

    forgotten, gone = one()
    registered, kept = one()
    ctxalloc.register(fresh_name(), registered)
    del forgotten, registered
    gc.collect()
    assert gone() is None
    assert kept() is not None

    def by_address() -> None:
        strategies.Callbacks(malloc=16, calloc=16, realloc=16, free=16)

    by_address()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        by_address()
    assert sys.getallocatedblocks() - before < 500
