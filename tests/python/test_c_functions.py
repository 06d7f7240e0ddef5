"""The C functions from extensions that know nothing of Rust: NEP 49's final interface and both drafts (`tests/c/`)."""

import asyncio
import contextvars
import ctypes
import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, NonCallableMock

import c_extensions
import numpy as np
import pytest
from numpy_c import ForeignHandler, numpys_name, set_handler
from subprocesses import run, says

import ctxalloc
import ctxalloc_example as example

pytestmark = pytest.mark.skipif(not c_extensions.compiler(), reason="there is no C compiler")


@pytest.fixture(scope="module")
def final() -> ModuleType:
    module = c_extensions.built("final_nep49")
    assert module.register() == "headed, final"
    assert module.register() == "headed, final"  # the same struct, the same handler
    return module


@pytest.fixture(scope="module")
def draft1() -> ModuleType:
    return c_extensions.built("first_draft")


@pytest.fixture(scope="module")
def draft2() -> ModuleType:
    return c_extensions.built("second_draft")


@pytest.fixture
def all_is_in_order(final: ModuleType, draft1: ModuleType, draft2: ModuleType) -> Iterator[None]:
    """Each of the three allocators finds its blocks as it left them, with the GIL held at each call."""
    before = [module.counts()["alive"] for module in (final, draft1, draft2)]
    yield
    gc.collect()
    for module, alive in zip((final, draft1, draft2), before, strict=True):
        assert module.counts() == {"alive": alive, "wrong_sizes": 0, "not_ours": 0, "without_gil": 0}


pytestmark = [pytestmark, pytest.mark.usefixtures("all_is_in_order")]


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


def test_a_thread_starts_with_the_default_and_a_task_with_a_copy(final: ModuleType) -> None:
    seen: list[str] = []

    async def child(name: str) -> str:
        before = final.current()[0]
        final.select_by_ctxalloc(name)
        await asyncio.sleep(0)
        assert final.current()[0] == name
        assert final.handler_of(final.new_array(100)) == name
        return str(before)

    async def main() -> list[str]:
        final.select_by_ctxalloc("headed, final")
        befores = await asyncio.gather(*(child(name) for name in ["pool", "system", "headed, final"] * 20))
        assert final.current()[0] == "headed, final"
        return befores

    assert set(asyncio.run(main())) == {"headed, final"}
    assert final.current()[0] == "default_allocator"
    final.select_by_ctxalloc("headed, final")
    try:
        thread = threading.Thread(target=lambda: seen.append(final.current()[0]))
        thread.start()
        thread.join()
    finally:
        final.select_by_ctxalloc(None)
    inherits = getattr(sys.flags, "thread_inherit_context", 0)  # from 3.14 on
    assert seen == (["headed, final"] if inherits else ["default_allocator"])


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


# ---- the event hook


@pytest.mark.parametrize(
    "name", ["default_allocator", "system", "pool", "tracked", "headed, final", "headed, first draft"]
)
def test_the_hook_hears_of_every_array(draft2: ModuleType, draft1: ModuleType, name: str) -> None:
    draft1.push(1)
    draft1.pop()
    with ctxalloc.use(name):
        assert draft2.set_hook(False) == (False, False)
        array = np.empty(5000, dtype=np.uint8)
        zeros = np.zeros(3000, dtype=np.uint8)
        array.resize(7000, refcheck=False)
        del array, zeros
        events = draft2.events()
        assert draft2.end_hook()
    assert events == {"new": 2, "renew": 1, "free": 2, "inside": 0, "bytes": 15_000}
    assert draft2.events() == events
    np.ones(10)
    assert draft2.events() == events, "the hook is gone"


def test_the_hook_hears_of_requests_and_of_what_is_adopted_meanwhile(
    draft2: ModuleType, fresh_name: Callable[[], str]
) -> None:
    foreign = ForeignHandler(fresh_name())
    draft2.set_hook(False)
    try:
        with ctxalloc.request():
            array = np.empty(5000, dtype=np.uint8)
            del array
        assert draft2.events()["new"] == draft2.events()["free"] == 1
        old = set_handler(foreign.capsule)
        ctxalloc.current()  # adopted on sight
        array = np.empty(5000, dtype=np.uint8)
        del array
        set_handler(old)
        assert draft2.events()["new"] == draft2.events()["free"] == 2
    finally:
        draft2.end_hook()


def test_the_hook_hears_of_the_foreign_handler_selected_when_it_is_set(
    draft2: ModuleType, fresh_name: Callable[[], str]
) -> None:
    foreign = ForeignHandler(fresh_name())
    old = set_handler(foreign.capsule)  # by NumPy: ctxalloc has not seen it
    try:
        draft2.set_hook(False)
        array = np.empty(5000, dtype=np.uint8)
        del array
        assert (draft2.events()["new"], draft2.events()["free"]) == (1, 1)
    finally:
        draft2.end_hook()
        set_handler(old)


def test_the_hook_does_not_hear_itself(draft2: ModuleType) -> None:
    with ctxalloc.use("pool"):
        assert draft2.set_hook(True) == (False, False)
        try:
            array = np.empty(5000, dtype=np.uint8)
            del array
            assert draft2.events() == {"new": 1, "renew": 0, "free": 1, "inside": 2, "bytes": 5000}
        finally:
            draft2.end_hook()


def test_the_hook_hears_of_buffers_that_threads_without_python_make(draft2: ModuleType) -> None:
    draft2.set_hook(False)
    try:
        with ctxalloc.use("system"):
            assert example.buffers_on_threads(4, 100) == 400
        events = draft2.events()
    finally:
        draft2.end_hook()
    assert (events["new"], events["free"]) == (400, 400)


# ---- tracemalloc


def bytes_in(domain: int) -> int:
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(inclusive=True, domain=domain)])
    return sum(trace.size for trace in snapshot.traces)


NUMPYS_DOMAIN = 389_047


@pytest.mark.parametrize("name", ["pool", "headed, final", "headed, first draft", "default_allocator"])
def test_tracemalloc_counts_arrays_once_in_numpys_domain(draft1: ModuleType, name: str) -> None:
    draft1.push(1)
    draft1.pop()
    tracemalloc.start()
    try:
        before = bytes_in(NUMPYS_DOMAIN), bytes_in(ctxalloc.tracemalloc_domain)
        with ctxalloc.use(name):
            array = np.empty(1_000_000, dtype=np.uint8)
        assert bytes_in(NUMPYS_DOMAIN) - before[0] == 1_000_000
        del array
        assert (bytes_in(NUMPYS_DOMAIN), bytes_in(ctxalloc.tracemalloc_domain)) == before
    finally:
        tracemalloc.stop()


def test_tracemalloc_counts_buffers_and_blocks_of_c_in_our_domain() -> None:
    tracemalloc.start()
    try:
        before = bytes_in(NUMPYS_DOMAIN), bytes_in(ctxalloc.tracemalloc_domain)
        kept = example.KeptBuffer(123_456)
        assert bytes_in(ctxalloc.tracemalloc_domain) - before[1] == 123_456
        kept.resize(1_000_000)
        assert bytes_in(ctxalloc.tracemalloc_domain) - before[1] == 1_000_000
        assert bytes_in(NUMPYS_DOMAIN) == before[0]
        del kept
        block = c_extensions.api().new(5000)
        assert bytes_in(ctxalloc.tracemalloc_domain) - before[1] == 5000
        c_extensions.api().free(block)
        assert (bytes_in(NUMPYS_DOMAIN), bytes_in(ctxalloc.tracemalloc_domain)) == before
    finally:
        tracemalloc.stop()


def test_a_buffer_from_before_tracing_does_no_harm() -> None:
    kept = example.KeptBuffer(10_000)
    tracemalloc.start()
    try:
        del kept
        assert bytes_in(ctxalloc.tracemalloc_domain) == 0
        kept = example.KeptBuffer(10_000)
    finally:
        tracemalloc.stop()
    del kept


def test_tracing_from_the_start_is_seen_too() -> None:
    program = """
import tracemalloc, ctxalloc, ctxalloc_example
kept = ctxalloc_example.KeptBuffer(5000)
only = tracemalloc.DomainFilter(inclusive=True, domain=ctxalloc.tracemalloc_domain)
print(sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([only]).traces))
"""
    assert says(program, "-X", "tracemalloc") == "5000"


# ---- bad input


def test_calling_before_import_raises() -> None:
    module = c_extensions.built("not_imported")
    for function in ("get", "new", "free", "find", "hook", "draft", "version"):
        with pytest.raises(RuntimeError, match=r"call ctxalloc_import\(\)"):
            getattr(module, function)()
    assert module.message() == "ctxalloc_import() was not called, or failed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"abi_version": 2}, r"C interface 1, installed is 2\); rebuild it"),
        ({"size_bytes": 40}, "is older than the header this module was built with"),
    ],
    ids=["another", "older"],
)
def test_another_table_is_refused_at_import(change: dict[str, int], message: str) -> None:
    with c_extensions.another_table(**change), pytest.raises(ImportError, match=message):
        c_extensions.built("not_imported").do_import()


def test_an_import_keeps_the_pending_exception() -> None:
    module = c_extensions.built("not_imported")
    with pytest.raises(KeyError, match="the first") as caught:
        module.import_while_raising()
    assert caught.value.__context__ is None
    with c_extensions.another_table(abi_version=2), pytest.raises(ImportError, match="rebuild it") as refused:
        module.import_while_raising()
    assert isinstance(refused.value.__context__, KeyError)
    assert refused.value.__context__.args == ("the first",)


def test_a_newer_table_is_taken() -> None:
    program = """
import c_extensions
with c_extensions.another_table(size_bytes=1000):
    module = c_extensions.built("not_imported")
    module.do_import()
    print(module.version())
"""
    done = says(f"import sys; sys.path.insert(0, {str(c_extensions.HERE)!r})\n" + program)
    assert done == ctxalloc.__version__


def test_without_the_package_import_says_so() -> None:
    program = f"""
import sys; sys.path.insert(0, {str(c_extensions.HERE)!r})
import c_extensions
module = c_extensions.built("not_imported")
sys.modules["ctxalloc"] = None
module.do_import()
"""
    outcome = run(program)
    assert outcome.code == 1
    assert "ImportError" in outcome.err or "ModuleNotFoundError" in outcome.err


def test_unknown_names_and_structs_raise(final: ModuleType) -> None:
    with pytest.raises(ctxalloc.UnknownHandlerError, match="no handler is named 'nobody'"):
        final.select_by_ctxalloc("nobody")
    api = c_extensions.api()
    here = ctypes.create_string_buffer(168)
    with pytest.raises(ValueError, match="is not registered; call ctxalloc_register"):
        api.set_handler(ctypes.addressof(here))
    with pytest.raises(ValueError, match="handler is NULL"):
        api.register(None, None)
    with pytest.raises(ctxalloc.RegistrationError, match="a handler struct 0 is not known"):
        api.register(ctypes.addressof(here), None)
    with pytest.raises(ValueError, match="no live block"):
        api.free(ctypes.addressof(here))
    with pytest.raises(MemoryError, match="could not allocate"):
        api.new(2**63)
    with pytest.raises(ValueError, match="array is NULL"):
        api.handler_of(None)
    assert ctxalloc.current().name == "default_allocator"


FAIL_WHILE_RAISING = {
    "find nobody": ((), ctxalloc.UnknownHandlerError, "nobody"),
    "register nothing": ((), ValueError, "handler is NULL"),
    "adopt": ((3,), TypeError, "PyCapsule"),
    "handler_of": ((3,), TypeError, "takes a numpy.ndarray"),
    "free": ((), ValueError, "no live block"),
    "new": ((), MemoryError, "could not allocate"),
}


@pytest.mark.parametrize("what", FAIL_WHILE_RAISING)
def test_a_call_that_fails_during_an_exception_raises_its_own_after_it(final: ModuleType, what: str) -> None:
    arguments, kind, message = FAIL_WHILE_RAISING[what]
    with pytest.raises(kind, match=message) as caught:
        final.while_raising(what, *arguments)
    assert isinstance(caught.value.__context__, KeyError)
    assert caught.value.__context__.args == ("the first",)


@pytest.mark.parametrize("what", ["find", "select", "capsule", "blocks", "handler_of", "adopt"])
def test_a_call_that_succeeds_during_an_exception_leaves_it_there(final: ModuleType, what: str) -> None:
    arguments = {"handler_of": (np.ones(3),), "adopt": (ctxalloc.handler("pool").capsule,)}.get(what, ())
    with pytest.raises(KeyError, match="the first") as caught:
        final.while_raising(what, *arguments)
    assert caught.value.__context__ is None


def test_the_first_failure_of_a_process_may_come_during_an_exception() -> None:
    program = f"""
import sys; sys.path.insert(0, {str(c_extensions.HERE)!r})
import c_extensions
final = c_extensions.built("final_nep49")
for what in ("find nobody", "register nothing"):
    try:
        final.while_raising(what)
    except ValueError as error:
        print(type(error).__name__, "after", repr(error.__context__))
"""
    assert says(program) == ("UnknownHandlerError after KeyError('the first')\nValueError after KeyError('the first')")


def test_a_budgets_limit_is_a_memory_error_in_c_too() -> None:
    with pytest.raises(MemoryError), ctxalloc.request(limit_bytes=1000):
        c_extensions.api().new(5000)


# ---- the header


@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize(
    "macros",
    [(), ("CTXALLOC_PYTHON",), ("CTXALLOC_PYTHON", "Py_LIMITED_API=0x030b0000")],
    ids=["linked", "Python", "abi3"],
)
def test_the_header_compiles_without_a_warning(language: str, macros: tuple[str, ...]) -> None:
    c_extensions.compile_header(language, macros)


# What NumPy 1.26's headers have of it.
NUMPY_1 = """
#define NUMPY_CORE_INCLUDE_NUMPY_NDARRAYTYPES_H_
#define NPY_ABI_VERSION 0x01000009
typedef struct {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t nelem, size_t elsize);
    void *(*realloc)(void *ctx, void *ptr, size_t new_size);
    void (*free)(void *ctx, void *ptr, size_t size);
} PyDataMemAllocator;
typedef struct {
    char name[127];
    uint8_t version;
    PyDataMemAllocator allocator;
} PyDataMem_Handler;
typedef void (PyDataMem_EventHookFunc)(void *inp, void *outp, size_t size, void *user_data);
static void **PyArray_API;
#define PyDataMem_SetEventHook \\
    (*(PyDataMem_EventHookFunc * (*)(PyDataMem_EventHookFunc *, void *, void **)) PyArray_API[291])
"""
USES_NUMPYS_NAMES = """
#define CTXALLOC_PYTHON
#define CTXALLOC_NUMPY_NAMES
#include <ctxalloc.h>
static void hook(void *inp, void *outp, size_t size, void *user_data)
{
    (void)inp, (void)outp, (void)size, (void)user_data;
}
PyDataMem_EventHookFunc *set(void);
PyDataMem_EventHookFunc *set(void) { return PyDataMem_SetEventHook(hook, NULL, NULL); }
"""


@pytest.mark.parametrize(
    "numpys",
    ["", NUMPY_1, "#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION\n#include <numpy/arrayobject.h>\n"],
    ids=["without NumPy", "NumPy 1.26", "this NumPy"],
)
def test_numpys_old_names_may_stand_beside_numpys_own_header(numpys: str) -> None:
    c_extensions.compile_text(f"#include <Python.h>\n{numpys}{USES_NUMPYS_NAMES}")


def test_an_extension_of_several_files_imports_once() -> None:
    module = c_extensions.built("several", "several_more")
    with ctxalloc.use("pool"):
        assert module.name_here() == module.name_there() == "pool"


def test_the_header_is_found() -> None:
    assert (c_extensions.Path(ctxalloc.get_include()) / "ctxalloc.h").is_file()


def test_pkg_config_finds_the_header_of_the_package() -> None:
    flags = c_extensions.pkg_config("--cflags")
    if flags is None:
        pytest.skip("there is no pkg-config")
    assert flags.startswith("-I")
    assert (c_extensions.Path(flags.removeprefix("-I")) / "ctxalloc.h").is_file()
    assert c_extensions.pkg_config("--modversion") == ctxalloc.__version__
