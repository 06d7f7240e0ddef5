"""`@ctxalloc.use()` on functions, coroutine functions and other callables. Generators: test_use_generators.py."""

import asyncio
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ctxalloc
from ctxalloc import current, use


@use("aligned64")
def documented(rows: int, columns: int = 3, *, dtype: str = "f8") -> np.ndarray:
    """Makes an array."""
    return np.zeros((rows, columns), dtype)


@use("aligned64")
async def documented_coroutine(rows: int) -> np.ndarray:
    """Makes an array, later."""
    await asyncio.sleep(0)
    return np.zeros(rows)


def name_here() -> str:
    return current().name


def test_a_function_runs_in_the_scope_at_each_call() -> None:
    for _ in range(2):
        array = documented(2, dtype="f4")
        assert array.shape == (2, 3)
        assert array.dtype == "f4"
        assert ctxalloc.handler_of(array) is ctxalloc.handler("aligned64")
        assert current().name == "default_allocator"


def test_a_decorated_function_looks_like_itself() -> None:
    assert documented.__name__ == "documented"
    assert documented.__doc__ == "Makes an array."
    assert documented.__module__ == __name__
    assert list(inspect.signature(documented).parameters) == ["rows", "columns", "dtype"]
    assert documented.__wrapped__.__name__ == "documented"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(documented)) is documented
    assert documented_coroutine.__name__ == "documented_coroutine"
    assert documented_coroutine.__doc__ == "Makes an array, later."


def test_the_kind_of_a_function_stays_what_inspect_says() -> None:
    assert inspect.iscoroutinefunction(documented_coroutine)
    assert not inspect.iscoroutinefunction(documented)
    assert not inspect.isgeneratorfunction(documented)


def test_one_scope_object_decorates_many_functions_and_stays_free() -> None:
    scope = use("aligned64")
    first = scope(name_here)

    @scope
    def second() -> tuple[str, str]:
        return name_here(), first()

    assert second() == ("aligned64", "aligned64")
    with scope:
        assert first() == "aligned64"


def test_a_handler_and_none_decorate_too() -> None:
    with use("aligned64"):
        assert use(None)(name_here)() == "default_allocator"
    assert use(ctxalloc.handler("system"))(name_here)() == "system"


def test_methods_of_all_kinds_are_decorated() -> None:
    class Worker:
        @use("aligned64")
        def method(self) -> tuple[object, str]:
            return self, name_here()

        @use("aligned64")
        @staticmethod
        def inner_static() -> str:
            return name_here()

        @staticmethod
        @use("aligned64")
        def outer_static() -> str:
            return name_here()

        @use("aligned64")
        @classmethod
        def inner_class(cls) -> tuple[object, str]:
            return cls, name_here()

        @classmethod
        @use("aligned64")
        def outer_class(cls) -> tuple[object, str]:
            return cls, name_here()

        @property
        @use("aligned64")
        def attribute(self) -> str:
            return name_here()

        @use("aligned64")
        async def coroutine(self) -> tuple[object, str]:
            await asyncio.sleep(0)
            return self, name_here()

    worker = Worker()
    assert worker.method() == Worker.method(worker) == (worker, "aligned64")
    assert worker.inner_static() == Worker.inner_static() == "aligned64"
    assert worker.outer_static() == Worker.outer_static() == "aligned64"
    assert worker.inner_class() == Worker.inner_class() == (Worker, "aligned64")
    assert worker.outer_class() == Worker.outer_class() == (Worker, "aligned64")
    assert worker.attribute == "aligned64"
    assert asyncio.run(worker.coroutine()) == (worker, "aligned64")
    assert current().name == "default_allocator"


def test_partials_builtins_and_callable_objects_are_decorated() -> None:
    class Adder:
        def __call__(self, left: int, right: int) -> tuple[int, str]:
            return left + right, name_here()

    class AsyncAdder:
        async def __call__(self, left: int, right: int) -> tuple[int, str]:
            await asyncio.sleep(0)
            return left + right, name_here()

    async def later(number: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return number, name_here()

    assert use("aligned64")(functools.partial(Adder(), 1))(2) == (3, "aligned64")
    assert use("aligned64")(Adder())(1, 2) == (3, "aligned64")
    assert ctxalloc.handler_of(use("aligned64")(np.empty)(5)).name == "aligned64"  # type: ignore[union-attr]
    assert use("aligned64")(abs)(-1) == 1
    assert asyncio.run(use("aligned64")(AsyncAdder())(1, 2)) == (3, "aligned64")
    assert asyncio.run(use("aligned64")(functools.partial(later, 1))()) == (1, "aligned64")


@pytest.mark.parametrize("subject", [3, "system", None, int, type("Mine", (), {})])
def test_what_is_no_function_is_refused_when_it_is_decorated(subject: Any) -> None:
    # A class, too: it would silently stop being one.
    with pytest.raises(TypeError, match=r"@ctxalloc\.use\('aligned64'\) decorates functions.* not "):
        use("aligned64")(subject)


# ---- coroutine functions -----------------------------------------------------------------------------


def test_a_coroutine_function_runs_in_the_scope_across_awaits() -> None:
    @use("aligned64")
    async def work() -> list[str]:
        seen = [name_here()]
        await asyncio.sleep(0)
        seen.append(name_here())
        ctxalloc.set_handler("system")
        await asyncio.sleep(0)
        return [*seen, name_here()]

    async def main() -> None:
        assert await work() == ["aligned64", "aligned64", "system"]
        assert current().name == "default_allocator"
        with use("system"):
            coroutine = work()  # its scope begins when it is awaited
            assert current().name == "system"
            await coroutine
            assert current().name == "system"
        array = await documented_coroutine(3)
        assert ctxalloc.handler_of(array) is ctxalloc.handler("aligned64")

    asyncio.run(main())


def test_a_coroutine_that_is_never_awaited_selects_nothing() -> None:
    coroutine = documented_coroutine(1)
    assert current().name == "default_allocator"
    coroutine.close()


def test_the_wrong_arguments_are_refused_as_without_the_decorator() -> None:
    with pytest.raises(TypeError, match="documented\\(\\) missing 1 required positional argument"):
        documented()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        documented(1, depth=2)  # type: ignore[call-arg]
    assert current().name == "default_allocator"


def test_the_type_of_a_function_is_kept_for_type_checkers() -> None:
    # mypy reads this file: a wrong stub is an error there.
    kept: Callable[[int], np.ndarray] = documented
    assert kept(1).shape == (1, 3)
