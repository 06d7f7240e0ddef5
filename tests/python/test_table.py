"""The table: `register`, `handler`, `handlers`, the Handler object; bad input is refused and changes nothing."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import subprocesses
from numpy_c import address_of

import ctxalloc
from ctxalloc.strategies import Aligned, Strategy, System


@pytest.fixture
def the_table_is_unchanged() -> Any:
    """What is refused must leave no trace."""
    before = [(handler, repr(handler)) for handler in ctxalloc.handlers()]
    yield
    assert [(handler, repr(handler)) for handler in ctxalloc.handlers()] == before


# ---- what is there -----------------------------------------------------------------------------------


def test_built_in_handlers_and_numpys_default_are_there_from_the_start() -> None:
    names = subprocesses.says("import ctxalloc; print(*(handler.name for handler in ctxalloc.handlers()))").split()
    assert names[:2] == ["system", "aligned64"]
    assert names[-1] == "default_allocator"


def test_a_handler_says_what_it_is() -> None:
    system, aligned, default = map(ctxalloc.handler, ["system", "aligned64", "default_allocator"])
    assert repr(system) == '<ctxalloc.Handler "system": System, version 1>'
    assert repr(aligned) == '<ctxalloc.Handler "aligned64": Aligned(align=64), version 1>'
    assert repr(default).startswith('<ctxalloc.Handler "default_allocator": foreign handler at 0x')
    assert [(h.name, h.version, h.alignment) for h in (system, aligned, default)] == [
        ("system", 1, 16),
        ("aligned64", 1, 64),
        ("default_allocator", 1, 16),
    ]


def test_a_handler_is_one_object_for_ever() -> None:
    handler = ctxalloc.handler("aligned64")
    assert handler is ctxalloc.handler("aligned64")
    assert handler in ctxalloc.handlers()
    assert handler.capsule is handler.capsule
    assert copy.copy(handler) is copy.deepcopy(handler) is handler
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps([handler, handler], protocol)) == [handler, handler]
    assert {handler: 1}[ctxalloc.handler("aligned64")] == 1
    assert handler != ctxalloc.handler("system")
    assert handler.__eq__("aligned64") is NotImplemented


def test_a_handler_pickled_under_a_name_that_is_not_there_says_so(fresh_handler: Callable[[], Any]) -> None:
    handler = fresh_handler()
    program = f"import pickle; pickle.loads({pickle.dumps(handler)!r})"
    outcome = subprocesses.run(program)
    assert outcome.code == 1
    assert f"UnknownHandlerError: no handler is named '{handler.name}'" in outcome.err


def test_handlers_are_immutable() -> None:
    handler = ctxalloc.handler("system")
    for attribute in ("name", "version", "alignment", "capsule", "anything"):
        with pytest.raises(AttributeError):
            setattr(handler, attribute, 1)
    with pytest.raises(TypeError):
        type("Mine", (ctxalloc.Handler,), {})


def test_handlers_come_in_the_order_of_their_registration(fresh_name: Callable[[], str]) -> None:
    names = [fresh_name() for _ in range(20)]
    made = [ctxalloc.register(name, System()) for name in names]
    assert ctxalloc.handlers()[-20:] == made
    listed = ctxalloc.handlers()
    listed.clear()  # a list of one's own
    assert ctxalloc.handlers()[-20:] == made


# ---- register ----------------------------------------------------------------------------------------


def test_a_registered_handler_is_found_selected_and_seen_by_numpy(fresh_name: Callable[[], str]) -> None:
    name = fresh_name()
    handler = ctxalloc.register(name, Aligned(align=np.int64(4096)))
    assert ctxalloc.handler(name) is handler
    assert (handler.name, handler.version, handler.alignment) == (name, 1, 4096)
    with ctxalloc.use(name):
        arrays = [np.empty(n) for n in (1, 100, 10_000)]
    assert [address_of(array) % 4096 for array in arrays] == [0, 0, 0]
    assert {ctxalloc.get_handler_name(array) for array in arrays} == {name}


def test_one_strategy_may_stand_behind_many_handlers(fresh_name: Callable[[], str]) -> None:
    strategy = System()
    first, second = (ctxalloc.register(fresh_name(), strategy) for _ in range(2))
    assert first != second
    with ctxalloc.use(first):
        array = np.ones(5)
    assert ctxalloc.handler_of(array) is first


@pytest.mark.parametrize(
    "name", ["x", " ", "a name with spaces", "Größe 測試 🧮", "n" * 126, "ü" * 63, "\x01", "system "]
)
def test_any_name_that_fits_numpys_struct_is_taken_and_round_trips(name: str, fresh_name: Callable[[], str]) -> None:
    handler = ctxalloc.register(name, System())
    assert handler.name == name
    with ctxalloc.use(name):
        assert ctxalloc.get_handler_name() == name == ctxalloc.get_handler_name(np.empty(1))
    assert pickle.loads(pickle.dumps(handler)) is handler


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "must not be empty"),
        ("n" * 127, "is 127 bytes long; at most 126 fit"),
        ("ü" * 64, "is 128 bytes long"),
        ("n" * 1000, "is 1000 bytes long"),
        ("nul\0inside", r"has a NUL at byte 3"),
        ("\0", "has a NUL at byte 0"),
        ("ends with\0", "has a NUL at byte 9"),
        ("system", "'system' is taken"),
        ("aligned64", "'aligned64' is taken"),
        ("default_allocator", "'default_allocator' is taken"),
    ],
)
@pytest.mark.usefixtures("the_table_is_unchanged")
def test_a_bad_name_is_refused_with_what_is_wrong(name: str, words: str) -> None:
    with pytest.raises(ctxalloc.RegistrationError, match=words) as caught:
        ctxalloc.register(name, System())
    assert isinstance(caught.value, ValueError)


@pytest.mark.usefixtures("the_table_is_unchanged")
def test_a_name_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        ctxalloc.register("\ud800", System())
    with pytest.raises(UnicodeEncodeError):
        ctxalloc.use("\ud800")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("name",),
        (b"bytes", System()),
        (None, System()),
        (3, System()),
        ("name", System),
        ("name", "System"),
        ("n", 1),
    ],
    ids=str,
)
@pytest.mark.usefixtures("the_table_is_unchanged")
def test_wrong_types_are_type_errors(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        ctxalloc.register(*arguments)


@pytest.mark.usefixtures("the_table_is_unchanged")
def test_register_takes_no_keywords() -> None:
    with pytest.raises(TypeError):
        ctxalloc.register(name="a", strategy=System())  # type: ignore[call-arg]


# ---- look-up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "System", "system\0", "system64", "n" * 1000], ids=["empty", "S", "NUL", "64", "long"]
)
@pytest.mark.usefixtures("the_table_is_unchanged")
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(
        ctxalloc.UnknownHandlerError, match=r"registered are: system, aligned64, .*default_allocator"
    ) as caught:
        ctxalloc.handler(name)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", [None, 3, b"system", ctxalloc.handler("system"), ["system"]])
def test_a_look_up_takes_a_str(name: Any) -> None:
    with pytest.raises(TypeError):
        ctxalloc.handler(name)


# ---- strategies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: Aligned(64),  # type: ignore[call-arg]  # options are keywords
        lambda: Aligned(alignment=64),  # type: ignore[call-arg]
        lambda: System(1),  # type: ignore[call-arg]
        lambda: Strategy(),  # type: ignore[call-arg]
        lambda: Strategy("Aligned"),
    ],
)
def test_strategies_refuse_options_they_do_not_know(call: Callable[[], Strategy]) -> None:
    with pytest.raises(TypeError):
        call()


def test_an_unknown_kind_of_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match='no strategy of kind "Magic"'):
        Strategy("Magic")
