"""Extensions of Python in C, built by the system's compiler against the public header alone; and that header's table.

What is built goes to a folder that is gone with the process.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import ctxalloc

HERE = Path(__file__).parent
SOURCES = HERE.parent / "c"
WARNINGS = ("-Wall", "-Wextra", "-pedantic", "-Werror")


def compiler(language: str = "c") -> list[str] | None:
    """The C compiler, `$CC` or cc, or the C++ one; None where there is none, or Python has no headers."""
    command = shlex.split(os.environ.get("CC", "cc") if language == "c" else os.environ.get("CXX", "c++"))
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return command if shutil.which(command[0]) and has_headers else None


def _compile(*arguments: str | Path, language: str = "c") -> None:
    command = compiler(language)
    assert command is not None
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr


def _python_headers() -> tuple[str, ...]:
    # Not ours to hold to our warnings.
    return ("-isystem", sysconfig.get_path("include"), "-isystem", np.get_include())


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="ctxalloc-c-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def built(name: str, *more: str) -> ModuleType:
    """The extension module of `tests/c/{name}.c`, and more files beside it."""
    return _extension(name, [SOURCES / f"{file}.c" for file in (name, *more)])


def built_from(name: str, text: str) -> ModuleType:
    """The extension module of a text."""
    source = _folder() / f"{name}.c"
    source.write_text(text)
    return _extension(name, [source])


def _extension(name: str, sources: list[Path]) -> ModuleType:
    library = _folder() / f"{name}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    options = ("-std=c99", "-D_POSIX_C_SOURCE=200809L", "-shared", "-fPIC", "-O1", "-g", "-pthread")
    include = f"-I{ctxalloc.get_include()}"
    _compile(*WARNINGS, *options, include, *_python_headers(), "-o", library, *sources)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_header(language: str, macros: tuple[str, ...]) -> None:
    """Compile a file that uses the header, with every warning as an error."""
    options = ["-std=c99" if language == "c" else "-std=c++11", "-c", f"-I{ctxalloc.get_include()}"]
    options += ["-Wno-unused-function"] if language == "c" else []
    options += [f"-D{macro}" for macro in macros]
    if macros:
        options += _python_headers()
    source: Path = SOURCES / "header.cpp"
    if language == "c":
        source = _folder() / "header.c"
        python_header = "#include <Python.h>\n" if macros else ""
        source.write_text(
            f"{python_header}#include <ctxalloc.h>\nint nothing(void);\nint nothing(void) {{ return 0; }}\n"
        )
    _compile(*WARNINGS, *options, "-o", _folder() / "header.o", source, language=language)


def compile_text(text: str, *, with_python: bool = True) -> None:
    """Compile a text that uses the header, with every warning as an error."""
    source = _folder() / "text.c"
    source.write_text(text)
    options = ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-Wno-unused-function", "-Wno-unused-variable", "-c"]
    include = [f"-I{ctxalloc.get_include()}", *(_python_headers() if with_python else ())]
    _compile(*WARNINGS, *options, *include, "-o", _folder() / "text.o", source)


def pkg_config(option: str) -> str | None:
    """What pkg-config says of the package; None where there is no pkg-config."""
    if not shutil.which("pkg-config"):
        return None
    environment = {**os.environ, "PKG_CONFIG_PATH": str(Path(ctxalloc.get_include(), "pkgconfig"))}
    done = subprocess.run(
        ["pkg-config", option, "ctxalloc"], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.strip()


# ---- the table behind `ctxalloc._C_API`, by ctypes

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

WORD = ctypes.sizeof(ctypes.c_void_p)
# Behind the two numbers and the version, in the header's order.
FUNCTIONS = (
    "error_code",
    "error_message",
    "clear_error",
    "register",
    "find",
    "default_handler",
    "set_handler",
    "get_handler",
    "handler_name",
    "handler_version",
    "handler_alignment",
    "draft1_set_handler",
    "draft1_get_handler_name",
    "draft2_set_handler",
    "draft2_get_handler_name",
    "set_event_hook",
    "new",
    "new_zeroed",
    "renew",
    "free",
    "block_handler",
    "copy_in",
    "copy_out",
    "copy",
    "raise",
    "handler_of",
    "capsule",
    "adopt",
)


class Api:
    """The table's functions, for pointers as ints; they raise as the header's wrappers do."""

    def __init__(self, address: int) -> None:
        self.abi_version, self.size_bytes = (ctypes.c_uint32 * 2).from_address(address)
        words = (ctypes.c_void_p * (2 + len(FUNCTIONS))).from_address(address)
        self._functions = dict(zip(FUNCTIONS, words[2:], strict=True))

    def __getattr__(self, name: str) -> Any:
        address = self._functions[name]
        assert address is not None

        def call(*arguments: int | None) -> int | None:
            kinds = [ctypes.c_size_t if isinstance(argument, int) else ctypes.c_void_p for argument in arguments]
            # PYFUNCTYPE: with the GIL held, and what is raised inside is raised here.
            answer = ctypes.PYFUNCTYPE(ctypes.c_void_p, *kinds)(address)(*arguments)
            if ctypes.PYFUNCTYPE(ctypes.c_int)(self._functions["error_code"])():
                ctypes.PYFUNCTYPE(None)(self._functions["raise"])()
            return answer

        return call


def api() -> Api:
    """The table of the installed package."""
    return Api(_get_pointer(ctxalloc._C_API, b"ctxalloc._C_API"))


@contextlib.contextmanager
def another_table(**change: int) -> Iterator[None]:
    """The package with a table in which `abi_version` or `size_bytes` is another."""
    own = _get_pointer(ctxalloc._C_API, b"ctxalloc._C_API")
    copy = ctypes.create_string_buffer(ctypes.string_at(own, api().size_bytes))
    numbers = (ctypes.c_uint32 * 2).from_buffer(copy)
    for name, value in change.items():
        numbers[("abi_version", "size_bytes").index(name)] = value
    kept, ctxalloc._C_API = ctxalloc._C_API, _new_capsule(ctypes.addressof(copy), b"ctxalloc._C_API", None)
    try:
        yield
    finally:
        ctxalloc._C_API = kept
