"""`set_handler()`, `reset()` and their Token: what each of them says.

What they select and restore, the random programs of `tests/oracle` compare with `ContextVar.set` and `reset`.
"""

import contextvars
from typing import Any

import pytest

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


def test_a_token_says_what_it_restores() -> None:
    first = set_handler("aligned64")
    second = set_handler("system")
    assert repr(first) == '<ctxalloc.Token old_handler="default_allocator">'
    assert repr(second) == '<ctxalloc.Token old_handler="aligned64">'
    reset(second)
    assert repr(second) == '<ctxalloc.Token used old_handler="aligned64">'
    reset(first)


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
