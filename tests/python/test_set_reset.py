"""`set_handler()`, `reset()` and their Token: what `ContextVar.set` and `reset` do, step by step."""

import asyncio
import contextvars
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from patience import wait_for

import ctxalloc
from ctxalloc import current, reset, set_handler

NAMES = ["system", "aligned64", "default_allocator"]


def test_set_selects_and_reset_restores() -> None:
    token = set_handler("aligned64")
    assert current() is ctxalloc.handler("aligned64")
    assert (token.used, token.old_handler) == (False, ctxalloc.handler("default_allocator"))
    reset(token)
    assert current().name == "default_allocator"
    assert (token.used, token.old_handler) == (True, ctxalloc.handler("default_allocator"))


def test_a_handler_a_name_and_none_are_selected() -> None:
    subjects: dict[ctxalloc.Handler | str | None, str] = {
        "aligned64": "aligned64",
        ctxalloc.handler("system"): "system",
        None: "default_allocator",
    }
    for subject, name in subjects.items():
        set_handler(subject)
        assert current().name == name


def test_a_token_without_reset_leaves_the_selection() -> None:
    set_handler("aligned64")
    assert current().name == "aligned64"
    set_handler(None)


def test_a_token_says_what_it_restores() -> None:
    first = set_handler("aligned64")
    second = set_handler("system")
    assert repr(first) == '<ctxalloc.Token old_handler="default_allocator">'
    assert repr(second) == '<ctxalloc.Token old_handler="aligned64">'
    reset(second)
    assert repr(second) == '<ctxalloc.Token used old_handler="aligned64">'
    reset(first)


def test_tokens_may_be_used_in_any_order() -> None:
    first, second, third = (set_handler(name) for name in ("aligned64", "system", None))
    reset(second)
    assert current().name == "aligned64"
    reset(third)
    assert current().name == "system"
    reset(first)
    assert current().name == "default_allocator"


def test_a_token_used_twice_is_a_runtime_error_and_changes_nothing() -> None:
    token = set_handler("aligned64")
    reset(token)
    set_handler("system")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="used once already") as caught:
            reset(token)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert current().name == "system"
    set_handler(None)


def test_a_foreign_token_is_a_value_error_and_stays_good_in_its_context() -> None:
    own = contextvars.copy_context()
    token = own.run(set_handler, "aligned64")
    with pytest.raises(ValueError, match="made in another context") as caught:
        reset(token)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not token.used
    assert (current().name, own.run(current).name) == ("default_allocator", "aligned64")
    own.run(reset, token)
    assert repr(token).startswith("<ctxalloc.Token used")
    assert own.run(current).name == "default_allocator"


def test_a_copy_of_a_context_is_another_context() -> None:
    token = set_handler("aligned64")
    copy = contextvars.copy_context()
    with pytest.raises(ValueError, match="another context"):
        copy.run(reset, token)
    assert copy.run(current).name == "aligned64"
    reset(token)
    assert copy.run(current).name == "aligned64"


def test_a_token_of_another_thread_or_task_is_a_value_error() -> None:
    tokens: list[ctxalloc.Token] = []
    done, go = threading.Event(), threading.Event()

    def in_thread() -> None:
        tokens.append(set_handler("aligned64"))
        done.set()
        go.wait()
        reset(tokens[0])  # refused elsewhere, still good here

    thread = threading.Thread(target=in_thread)
    thread.start()
    wait_for(done)
    try:
        with pytest.raises(ValueError, match="another context"):
            reset(tokens[0])
    finally:
        go.set()
    thread.join()
    assert tokens[0].used

    async def main() -> None:
        async def child() -> ctxalloc.Token:
            return set_handler("aligned64")

        token = await asyncio.create_task(child())
        with pytest.raises(ValueError, match="another context"):
            reset(token)
        token = await child()  # awaited, not a task: the same Context
        reset(token)

    asyncio.run(main())


@pytest.mark.parametrize("subject", [None, "token", 3, contextvars.ContextVar[int]("v").set(1), ctxalloc.use("system")])
def test_reset_takes_tokens_only(subject: Any) -> None:
    with pytest.raises(TypeError, match="Token"):
        reset(subject)


def test_a_failed_set_changes_nothing() -> None:
    set_handler("aligned64")
    with pytest.raises(ctxalloc.UnknownHandlerError):
        set_handler("no such handler")
    with pytest.raises(TypeError):
        set_handler()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        set_handler(handler="system")  # type: ignore[call-arg]
    assert current().name == "aligned64"
    set_handler(None)


def test_current_is_always_the_same_object() -> None:
    assert current() is current() is ctxalloc.handler("default_allocator")
    with ctxalloc.use("aligned64") as entered:
        objects = {id(current()) for _ in range(10)} | {id(entered), id(ctxalloc.handler("aligned64"))}
        assert len(objects) == 1


# ---- the same programs on a ContextVar and on ctxalloc -----------------------------------------------


class Reference:
    """A plain ContextVar that holds names: what every answer is compared with."""

    def __init__(self) -> None:
        self.variable = contextvars.ContextVar("reference", default="default_allocator")

    def set(self, name: str | None) -> Any:
        return self.variable.set(name or "default_allocator")

    def reset(self, token: Any) -> None:
        self.variable.reset(token)

    def name(self) -> str:
        return self.variable.get()

    def old(self, token: Any) -> str:
        return "default_allocator" if token.old_value is contextvars.Token.MISSING else token.old_value


class Subject:
    """ctxalloc, spoken to in the same words."""

    def set(self, name: str | None) -> Any:
        return set_handler(name)

    def reset(self, token: Any) -> None:
        reset(token)

    def name(self) -> str:
        return current().name

    def old(self, token: Any) -> str:
        return str(token.old_handler.name)


def random_walk(layer: Reference | Subject, seed: int) -> list[str]:
    """Sets and resets at random in a few Contexts, tasks and threads; what each step saw."""
    choose = random.Random(seed)
    seen: list[str] = []
    tokens: list[Any] = []
    contexts = [contextvars.copy_context() for _ in range(3)]

    def step() -> None:
        if choose.random() < 0.5 or not tokens:
            tokens.append(layer.set(choose.choice([*NAMES, None])))
            seen.append(layer.old(tokens[-1]))
        else:
            token = choose.choice(tokens)
            try:
                layer.reset(token)
            except (RuntimeError, ValueError) as error:
                seen.append(type(error).__name__)
        seen.append(layer.name())

    def elsewhere(action: Callable[[], Any]) -> None:
        where = choose.randrange(6)
        if where < 3:
            contexts[where].run(action)
        elif where == 3:
            thread = threading.Thread(target=action)
            thread.start()
            thread.join()
        elif where == 4:
            action()
        else:

            async def task() -> None:
                await asyncio.create_task(as_coroutine(action))
                action()

            asyncio.run(task())

    async def as_coroutine(action: Callable[[], Any]) -> None:
        await asyncio.sleep(0)
        action()

    def walk() -> None:
        for _ in range(60):
            elsewhere(step)
            seen.append(layer.name())

    contextvars.copy_context().run(walk)
    return seen


def test_random_programs_do_what_a_context_variable_does() -> None:
    fresh = random.SystemRandom().randrange(2**32)
    for seed in [*range(12), fresh]:
        assert random_walk(Subject(), seed) == random_walk(Reference(), seed), f"seed {seed}"


def test_the_walk_notices_a_layer_that_leaks_between_contexts() -> None:
    # The comparison above must be able to fail: a variable of the process is no ContextVar.
    class Leaky(Reference):
        def __init__(self) -> None:
            super().__init__()
            self.value = "default_allocator"

        def set(self, name: str | None) -> Any:
            self.value = name or "default_allocator"
            return super().set(name)

        def name(self) -> str:
            return self.value

    assert any(random_walk(Leaky(), seed) != random_walk(Reference(), seed) for seed in range(12))


def test_coroutines_of_one_task_share_its_selection() -> None:
    async def child(name: str) -> None:
        set_handler(name)

    async def main(run: Callable[[Coroutine[Any, Any, None]], Any]) -> str:
        await run(child("aligned64"))
        return current().name

    async def awaited(coroutine: Coroutine[Any, Any, None]) -> None:
        await coroutine

    assert asyncio.run(main(awaited)) == "aligned64"
    assert asyncio.run(main(asyncio.create_task)) == "default_allocator"
    assert asyncio.run(main(asyncio.gather)) == "default_allocator"
