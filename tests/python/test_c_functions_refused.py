"""What C is told that calls wrongly, and what its compiler is given: the header."""

import ctypes
from types import ModuleType

import c_extensions
import numpy as np
import pytest
from subprocesses import run, says

import ctxalloc

pytestmark = [
    pytest.mark.skipif(not c_extensions.compiler(), reason="there is no C compiler"),
    pytest.mark.usefixtures("all_is_in_order"),
]


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
