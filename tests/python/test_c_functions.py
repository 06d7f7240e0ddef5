"""The C functions from extensions that know nothing of Rust: NEP 49's final interface and both drafts (`tests/c/`)."""

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, NonCallableMock

import c_extensions
import numpy as np
import pytest
from numpy_c import ForeignHandler, numpys_name

import ctxalloc
import ctxalloc_example as example

pytestmark = [
    pytest.mark.skipif(not c_extensions.compiler(), reason="there is no C compiler"),
    pytest.mark.usefixtures("all_is_in_order"),
]


# ---- final NEP 49


def test_a_struct_of_numpys_own_type_is_a_handler_of_the_table(final: ModuleType) -> None:
    handler = ctxalloc.handler("headed, final")
    with ctxalloc.use(handler):
        assert final.current() == ("headed, final", 1, 1)
        array = np.ones(1000)
        assert final.counts()["alive"] == 1
    assert ctxalloc.handler_of(array) is handler
    assert final.handler_of(array[10:20]) == "headed, final"
    assert numpys_name(array) == "headed, final"
    assert final.handler_of(np.frombuffer(b"12345678")) is None


def test_the_c_function_reads_nothing_of_what_only_claims_to_be_an_array(final: ModuleType) -> None:
    for liar in (NonCallableMock(spec=np.ndarray), MagicMock(spec=np.ndarray)):
        with pytest.raises(TypeError, match=r"takes a numpy\.ndarray, got '"):
            final.handler_of(liar)


def test_set_and_get_from_c_are_numpys_context_variable(final: ModuleType) -> None:
    assert final.select_by_ctxalloc("headed, final") == "default_allocator"
    assert ctxalloc.current().name == numpys_name() == "headed, final"
    assert final.handler_of(final.new_array(10)) == "headed, final"
    assert final.select_by_ctxalloc("pool") == "headed, final"
    assert final.select_by_ctxalloc(None) == "pool"
    assert ctxalloc.current().name == "default_allocator"


@pytest.mark.parametrize("by_hand", [False, True], ids=["our capsule", "a capsule made by hand"])
@pytest.mark.parametrize("name", ["headed, final", "pool"])
def test_numpys_own_set_handler_takes_ours(final: ModuleType, name: str, by_hand: bool) -> None:
    old = final.select_by_numpy(name, by_hand)
    assert ctxalloc.current() is ctxalloc.handler(name)
    assert final.handler_of(np.ones(3)) == name
    final.restore_by_numpy(old)
    assert ctxalloc.current().name == "default_allocator"


def test_capsules_of_others_are_adopted(final: ModuleType, fresh_name: Callable[[], str]) -> None:
    foreign = ForeignHandler(fresh_name())
    alias = fresh_name()
    assert final.adopt(foreign.capsule, alias) == foreign.struct.name.decode()
    assert ctxalloc.handler(alias).capsule is foreign.capsule
    with pytest.raises(ctxalloc.RegistrationError, match="in the table already"):
        final.adopt(foreign.capsule, fresh_name())
    with pytest.raises(TypeError, match="PyCapsule"):
        final.adopt(object(), None)


def test_a_handlers_name_finds_it_also_where_its_struct_says_another(
    final: ModuleType, draft1: ModuleType, fresh_name: Callable[[], str]
) -> None:
    name = fresh_name()
    twins = [ForeignHandler(name), ForeignHandler(name)]
    names = [fresh_name(), fresh_name()]
    for twin, alias in zip(twins, names, strict=True):
        ctxalloc.adopt(twin.capsule, name=alias)
    for _ in range(2):
        for alias in names:
            with ctxalloc.use(alias):
                assert final.current()[0] == draft1.name_of(None) == draft1.name_of(np.ones(1)) == alias
    assert final.select_by_ctxalloc(names[1]) == "default_allocator"
    assert ctxalloc.current() is ctxalloc.handler(names[1])
    final.select_by_ctxalloc(None)


def test_an_adoption_without_a_name_is_refused_where_its_own_is_taken(
    final: ModuleType, fresh_name: Callable[[], str]
) -> None:
    first = ForeignHandler(fresh_name())
    assert final.adopt(first.capsule, None) == first.struct.name.decode()
    second = ForeignHandler(first.struct.name)
    held = sys.getrefcount(second.capsule)
    for name in (None, "pool"):
        with pytest.raises(ctxalloc.RegistrationError, match="is taken"):
            final.adopt(second.capsule, name)
        now = sys.getrefcount(second.capsule)
        assert now == held, "what was refused is not kept"


def test_many_threads_and_tasks_hand_blocks_over(final: ModuleType, draft1: ModuleType) -> None:
    arrays: list[Any] = []

    def work(number: int) -> None:
        for i in range(50):
            final.select_by_ctxalloc("headed, final" if (number + i) % 2 else "pool")
            arrays.append(np.full(i + 1, number, dtype=np.int64))
            if len(arrays) > 20:
                arrays.pop(0).resize(2 * i + 5, refcheck=False)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrays.clear()


# ---- the drafts


def test_the_first_draft_sets_and_gives_back(draft1: ModuleType) -> None:
    assert draft1.name_of(None) == "default_allocator"
    assert draft1.push(1) is None  # the default was selected: NULL
    try:
        assert draft1.name_of(None) == ctxalloc.current().name == "headed, first draft"
        array = np.arange(100)
        assert draft1.counts()["alive"] == 1
        assert draft1.name_of(array) == numpys_name(array) == "headed, first draft"
        assert draft1.push(2) == "headed, first draft"
        assert ctxalloc.current().name == "headed, first draft, too"
        array.resize(1000, refcheck=False)  # by its own
        assert draft1.use_previous() is True
        assert draft1.pop() == "headed, first draft, too"
        assert ctxalloc.current().name == "headed, first draft"
    finally:
        assert draft1.pop() == "headed, first draft"
    assert ctxalloc.current().name == "default_allocator"
    assert ctxalloc.handler_of(array) is ctxalloc.handler("headed, first draft")


def test_a_draft_is_set_under_any_number_of_requests(draft1: ModuleType) -> None:
    def begin(request: ctxalloc.Request) -> None:
        request.__enter__()
        assert draft1.push(1) == request.handler.name
        assert ctxalloc.current().name == "headed, first draft"
        assert draft1.pop() == "headed, first draft"
        assert ctxalloc.current() == request.handler

    for _ in range(2):  # the second time after as many have ended
        begun = [(contextvars.copy_context(), ctxalloc.request()) for _ in range(600)]
        for context, request in begun:
            context.run(begin, request)
        for context, request in begun:
            context.run(request.__exit__, None, None, None)


def test_two_libraries_may_carry_one_draft(draft1: ModuleType) -> None:
    again = c_extensions.built("first_draft_again")
    assert draft1.push(1) is None
    try:
        first = np.ones(1000)
        before = draft1.counts()["alive"]
        assert again.push(1) == "headed, first draft"
        assert ctxalloc.current().name.startswith("headed, first draft@0x")
        assert again.name_of(None) == ctxalloc.current().name
        second = np.ones(1000)
        assert ctxalloc.handler_of(second) is ctxalloc.current()
        assert (draft1.counts()["alive"], again.counts()["alive"]) == (before, 1)
        assert again.push(1) == "headed, first draft"  # its own struct, whatever the table calls it
        assert again.pop() == "headed, first draft"
        assert again.pop() == "headed, first draft"
        assert ctxalloc.current() is ctxalloc.handler_of(first)
    finally:
        draft1.pop()
    del second
    assert again.counts() == {"alive": 0, "wrong_sizes": 0, "not_ours": 0, "without_gil": 0}


def test_a_draft_is_selected_for_its_thread_or_task_alone(draft1: ModuleType, draft2: ModuleType) -> None:
    names = {1: "headed, first draft", 2: "headed, first draft, too"}

    async def task(which: int) -> None:
        assert draft1.select(which) is None
        for _ in range(5):
            array = np.zeros(100)
            await asyncio.sleep(0)
            array.resize(1000, refcheck=False)
            assert draft1.name_of(None) == draft2.name_of(array) == names[which]

    async def main() -> None:
        await asyncio.gather(*(task(1 + number % 2) for number in range(40)))
        assert draft1.name_of(None) == "default_allocator"

    asyncio.run(main())
    threads = [threading.Thread(target=lambda n=number: asyncio.run(task(1 + n % 2))) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert draft1.name_of(None) == "default_allocator"


@pytest.mark.parametrize("name", ["pool", "headed, final"])
def test_a_handler_that_is_no_draft_is_given_back_as_one(draft1: ModuleType, final: ModuleType, name: str) -> None:
    with ctxalloc.use(name):
        assert draft1.push(1) == name
        assert ctxalloc.current().name == "headed, first draft"
        assert draft1.use_previous() is True
        assert draft1.pop() == "headed, first draft"
        assert ctxalloc.current() is ctxalloc.handler(name)


def test_a_request_is_put_back_by_a_draft(draft1: ModuleType) -> None:
    with ctxalloc.request() as scope:
        assert draft1.push(1) is not None
        assert draft1.pop() == "headed, first draft"
        array = np.ones(1000)
        assert scope.stats.live_bytes >= array.nbytes
        del array
    assert scope.escaped.count == 0


def test_get_handler_name_of_what_is_no_array_is_an_error(draft1: ModuleType, draft2: ModuleType) -> None:
    for module in (draft1, draft2):
        with pytest.raises(TypeError, match=r"takes a numpy\.ndarray, got 'int'"):
            module.name_of(3)
        assert module.name_of(np.frombuffer(b"12345678")) is None


def test_the_second_drafts_copy_functions_copy(draft2: ModuleType) -> None:
    before = draft2.copied_bytes()
    assert draft2.set(True) is None
    try:
        assert draft2.name_of(None) == "headed, second draft"
        assert draft2.name_of(np.ones(4)) == "headed, second draft"
        assert draft2.there_and_back(b"a text") == b"a text"
        assert [now - then for now, then in zip(draft2.copied_bytes(), before, strict=True)] == [6, 6, 6]
        draft2.fail(True)
        with pytest.raises(RuntimeError, match="could not copy 6 bytes: its host2obj returned NULL"):
            draft2.there_and_back(b"a text")
    finally:
        draft2.fail(False)
        draft2.set(False)
    assert draft2.there_and_back(b"a text") == b"a text"  # in the default: memcpy
    assert [now - then for now, then in zip(draft2.copied_bytes(), before, strict=True)] == [6, 6, 6]


def test_buffers_of_rust_are_copied_by_the_handlers_functions(draft2: ModuleType) -> None:
    draft2.set(True)
    try:
        before = draft2.copied_bytes()
        assert example.copied_buffer(b"0123456789") == (b"0123456789", "headed, second draft")
        host2obj, obj2host, obj2obj = (now - then for now, then in zip(draft2.copied_bytes(), before, strict=True))
        assert (host2obj, obj2obj, obj2host) == (10, 10, 10)
    finally:
        draft2.set(False)


@pytest.mark.parametrize("name", ["headed, final", "headed, first draft"])
def test_foreign_functions_are_called_with_the_gil_on_threads_of_rust_too(draft1: ModuleType, name: str) -> None:
    draft1.push(1)
    draft1.pop()
    with ctxalloc.use(name):
        assert example.buffers_on_threads(4, 50) == 200  # who held the GIL is counted: `all_is_in_order`
