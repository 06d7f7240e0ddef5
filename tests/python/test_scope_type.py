"""``Scope`` and ``use`` are made by hand from CPython's C API: they behave as any type does."""

import contextvars
import copy
import gc
import inspect
import pickle
import threading
from typing import Any

import pytest

import ctxalloc


def test_use_and_the_methods_of_a_scope_have_signatures() -> None:
    assert str(inspect.signature(ctxalloc.use)) == "(handler, /)"
    assert str(inspect.signature(ctxalloc.Scope.__enter__)) == "(self, /)"
    assert str(inspect.signature(ctxalloc.Scope.__exit__)) == "(self, kind, error, traceback, /)"
    assert str(inspect.signature(ctxalloc.use("system").__aexit__)) == "(kind, error, traceback, /)"


def test_use_is_found_by_its_name() -> None:
    assert ctxalloc.use.__name__ == "use"
    assert pickle.loads(pickle.dumps(ctxalloc.use)) is ctxalloc.use
    assert (ctxalloc.Scope.__module__, ctxalloc.Scope.__qualname__) == ("ctxalloc", "Scope")


@pytest.mark.parametrize("arguments", [(), ("system", "pool")])
def test_use_takes_one_argument(arguments: tuple[str, ...]) -> None:
    use: Any = ctxalloc.use
    with pytest.raises(TypeError, match="exactly one argument"):
        use(*arguments)
    with pytest.raises(TypeError, match="keyword"):
        use(handler="system")


@pytest.mark.parametrize("method", ["__exit__", "__aexit__"])
@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_leaving_takes_three_arguments_and_nothing_is_left_otherwise(method: str, count: int) -> None:
    with ctxalloc.use("aligned64") as chosen:
        scope = ctxalloc.use("system")
        scope.__enter__()
        with pytest.raises(TypeError, match=f"{method}.. takes kind, error and traceback, 3 arguments; got {count}"):
            getattr(scope, method)(*[None] * count)
        with pytest.raises(TypeError, match="keyword"):
            getattr(scope, method)(kind=None, error=None, traceback=None)
        assert ctxalloc.current().name == "system"
        scope.__exit__(None, None, None)
        assert ctxalloc.current() is chosen


def test_a_scope_decorates_one_function() -> None:
    scope: Any = ctxalloc.use("system")
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((len, len), {}),
        ((), {"function": len}),
        ((len,), {"more": 1}),
    ]
    for arguments, options in wrong:
        with pytest.raises(TypeError, match="decorates one function, given by position"):
            scope(*arguments, **options)


def test_methods_want_a_scope() -> None:
    enter: Any = ctxalloc.Scope.__enter__
    with pytest.raises(TypeError):
        enter(object())


def test_a_scope_is_made_by_use_only_and_neither_copied_nor_changed() -> None:
    kind: Any = ctxalloc.Scope
    scope: Any = ctxalloc.use("system")
    with pytest.raises(TypeError, match="cannot create"):
        kind()
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Sub", (kind,), {})
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.copy(scope)
    with pytest.raises(TypeError, match="immutable type"):
        kind.__enter__ = None
    with pytest.raises(AttributeError):
        scope.more = 1
    with pytest.raises(AttributeError):
        scope.handler = None


def test_a_scope_that_is_dropped_while_it_is_entered_lets_its_context_go() -> None:
    class Witness:
        alive = True

        def __del__(self) -> None:
            Witness.alive = False

    held = contextvars.ContextVar[Witness]("held")

    def enter() -> ctxalloc.Scope:
        held.set(Witness())
        scope = ctxalloc.use("system")
        scope.__enter__()
        return scope

    scope = contextvars.Context().run(enter)
    gc.collect()
    assert Witness.alive, "the token holds the Context"
    del scope
    gc.collect()
    assert not Witness.alive


def test_of_many_threads_that_enter_one_scope_at_once_one_is_let_in() -> None:
    threads, rounds = 8, 200
    scopes = [ctxalloc.use("aligned64") for _ in range(rounds)]
    let_in = [0] * rounds
    barrier = threading.Barrier(threads)

    def race() -> None:
        for number, scope in enumerate(scopes):
            barrier.wait()
            try:
                scope.__enter__()
            except RuntimeError:
                entered = False
            else:
                entered = True
            let_in[number] += entered
            barrier.wait()  # all have tried
            if entered and let_in[number] == 1:
                scope.__exit__(None, None, None)

    workers = [threading.Thread(target=race) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert let_in == [1] * rounds
