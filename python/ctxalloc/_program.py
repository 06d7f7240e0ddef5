"""Somebody's program, found and executed as ``python`` does it: ``ctxalloc run`` is around it.

The program is ``sys.modules["__main__"]`` from its beginning to the interpreter's end, with the names that ``python``
gives it: what outlives its last line (threads, ``atexit``), pickles and children of multiprocessing find it there.
``runpy``'s public functions put another module back when the last line has run, and keep a script's path relative.
"""

import builtins
import importlib.util
import io
import linecache
import os
import sys
import textwrap
import warnings
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from ctxalloc import _own_path, _shadowed


class UsageError(Exception):
    """The program cannot be run as asked."""


class RefusedError(UsageError):
    """``python`` itself would not begin with it: its exit status, and its words."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class Program(NamedTuple):
    """What to run."""

    name: str
    is_module: bool
    arguments: list[str]
    code: str | None = None
    """What ``-c`` was given, with ``-c`` for a name."""

    def command(self) -> list[str]:
        """What names it behind ``python`` or ``ctxalloc run``, with its arguments."""
        if self.code is not None:
            return ["-c", self.code, *self.arguments]
        return ["-m", self.name, *self.arguments] if self.is_module else [self.name, *self.arguments]

    def check(self) -> None:
        """UsageError: there is no such program. Before ``--compare``, which runs it often; it imports nothing of it."""
        if self.is_module:
            top = self.name.partition(".")[0]
            sys.path.insert(0, _current_folder())
            try:
                found = importlib.util.find_spec(top)
            except (ImportError, ValueError):
                found = None
            finally:
                del sys.path[0]
            if found is None:
                raise UsageError(f"there is no module {self.name!r}; install it, or give the path of a script")
        elif self.code is None and self.name != "-" and not Path(self.name).exists():
            if Path(self.name).is_absolute():
                raise UsageError(f"there is no script {self.name!r}")
            raise UsageError(f"there is no script {self.name!r} in {Path.cwd()}; for a module write -m {self.name}")

    def execute(self) -> None:
        """Runs it to its last line. RefusedError: it has nothing to run, as ``python`` would say."""
        sys.argv[:] = ["-m" if self.is_module else self.name, *self.arguments]
        main = ModuleType("__main__")  # before the program is looked for: parents of a module are imported
        main.__dict__.update(__builtins__=builtins)
        if sys.version_info < (3, 14):  # from then on they are made where they are asked for
            main.__annotations__ = {}
        sys.modules["__main__"] = main
        if self.code is not None:
            code, names = _given(self.code)
        else:
            code, names = self._module() if self.is_module else self._script()
        main.__dict__.update(names)
        exec(code, main.__dict__)  # noqa: S102 - what the user asked for

    def _module(self) -> tuple[CodeType, dict[str, Any]]:
        _first_on_path(_current_folder())
        import runpy  # noqa: PLC0415 - for modules, folders and archives only: here and below

        with warnings.catch_warnings(module=warnings):  # in sys.modules there may be the program's own by now
            if self.name in sys.modules:  # imported for ctxalloc: under `python` it might not be
                warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
            code, found = _as_runpy_finds(lambda: runpy._get_module_details(self.name, runpy._Error))  # type: ignore[attr-defined] # noqa: SLF001
        sys.argv[0] = str(found.origin)
        return code, _names_of(found)

    def _script(self) -> tuple[CodeType, dict[str, Any]]:
        if self.name == "-":
            _first_on_path("")
            names: dict[str, Any] = {"__file__": "<stdin>", "__cached__": None, "__spec__": None, "__package__": None}
            names["__loader__"] = BuiltinImporter
            return compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True), names
        # As python does, which leaves a `./` in it.
        path = os.path.join(_current_folder(), self.name) if self.name else _current_folder()  # noqa: PTH118
        if _is_archive(path):
            import runpy  # noqa: PLC0415

            if sys.flags.safe_path:  # which keeps away the current directory, and not what is asked for by name
                _own_path.restore()
                sys.path.insert(0, path)
            _first_on_path(path)
            code, found = _as_runpy_finds(lambda: runpy._get_main_module_details(runpy._Error))  # type: ignore[attr-defined] # noqa: SLF001
            return code, _names_of(found)
        _first_on_path(os.path.dirname(os.path.realpath(path)) if os.path.isabs(path) else "")  # noqa: PTH117, PTH120
        names = {"__file__": path, "__cached__": None, "__spec__": None, "__package__": None}
        if self.name.endswith(".pyc"):
            _text_of(path)
            loader: Any = SourcelessFileLoader("__main__", path)
            return loader.get_code("__main__"), {**names, "__loader__": loader}
        code = compile(_text_of(path), path, "exec", dont_inherit=True)
        return code, {**names, "__loader__": SourceFileLoader("__main__", path)}


def _given(text: str) -> tuple[CodeType, dict[str, Any]]:
    """As ``python -c``."""
    _first_on_path("")
    if sys.version_info >= (3, 14):
        text = textwrap.dedent(text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        said = f"Unable to decode the command from the command line:\nUnicodeEncodeError: {error}"
        raise RefusedError(1, said) from None
    code = compile(text, "<string>", "exec", dont_inherit=True)
    register = getattr(linecache, "_register_code", None)  # from 3.13 on: tracebacks show its lines
    if register is not None:  # 3.13.0 keeps them by the file's name
        register(code if hasattr(linecache, "_interactive_cache") else "<string>", text, "<string>")
    return code, {"__loader__": BuiltinImporter, "__spec__": None, "__package__": None}


def _current_folder() -> str:
    """Empty where it was removed, in which ``python`` runs modules, and scripts by their whole path."""
    try:
        return os.getcwd()  # noqa: PTH109 - as a str
    except OSError:
        return ""


def _first_on_path(folder: str) -> None:
    """In place of the folder of whatever was run in place of the program."""
    _own_path.restore()
    if not sys.flags.safe_path:
        sys.path[0] = folder
    _shadowed.forget()


def _text_of(path: str) -> bytes:
    try:
        with io.open_code(path) as file:
            return file.read()
    except OSError as error:
        said = f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        raise RefusedError(2, said) from None


def _as_runpy_finds(look: Callable[[], tuple[str, ModuleSpec, CodeType]]) -> tuple[CodeType, ModuleSpec]:
    """By the functions that ``python`` itself calls: they alone know what it says, and have no public names."""
    import runpy  # noqa: PLC0415

    try:
        _name, found, code = look()
    except runpy._Error as error:  # type: ignore[attr-defined] # noqa: SLF001
        raise RefusedError(1, f"{sys.executable}: {error}") from None
    return code, found


def _names_of(found: ModuleSpec) -> dict[str, Any]:
    return {
        "__file__": found.origin,
        "__cached__": found.cached,
        "__loader__": found.loader,
        "__spec__": found,
        "__package__": found.parent,
    }


def _is_archive(path: str) -> bool:
    """Whether it is a folder, or a file that modules can be imported from; ``python`` asks the same."""
    import pkgutil  # noqa: PLC0415 - as runpy

    return pkgutil.get_importer(path) is not None
