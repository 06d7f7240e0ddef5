"""Somebody's program, found and executed as ``python`` does it: ``ctxalloc run`` is around it.

The program is ``sys.modules["__main__"]`` from its beginning to the interpreter's end, with the names that ``python``
gives it: what outlives its last line (threads, ``atexit``), pickles and children of multiprocessing find it there.
``runpy``'s public functions put another module back when the last line has run, and keep a script's path relative.
"""

import builtins
import importlib.util
import io
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple


class UsageError(Exception):
    """The program cannot be run as asked."""


class Program(NamedTuple):
    """What to run."""

    name: str
    is_module: bool
    arguments: list[str]

    def check(self) -> None:
        """UsageError: there is no such program. Nothing of it is imported."""
        if self.is_module:
            top = self.name.partition(".")[0]
            sys.path.insert(0, str(Path.cwd()))
            try:
                found = importlib.util.find_spec(top)
            except (ImportError, ValueError):
                found = None
            finally:
                del sys.path[0]
            if found is None:
                raise UsageError(f"there is no module {self.name!r}; install it, or give the path of a script")
        elif self.name != "-" and not Path(self.name).exists():
            if Path(self.name).is_absolute():
                raise UsageError(f"there is no script {self.name!r}")
            raise UsageError(f"there is no script {self.name!r} in {Path.cwd()}; for a module write -m {self.name}")

    def execute(self) -> None:
        """Runs it to its last line. UsageError: it has nothing to run."""
        sys.argv[:] = ["-m" if self.is_module else self.name, *self.arguments]
        code, names = self._module() if self.is_module else self._script()
        main = ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, **names)
        if sys.version_info < (3, 14):  # from then on they are made where they are asked for
            main.__annotations__ = {}
        sys.modules["__main__"] = main
        exec(code, main.__dict__)  # noqa: S102 - what the user asked for

    def _module(self) -> tuple[CodeType, dict[str, Any]]:
        _first_on_path(str(Path.cwd()))
        name = self.name
        found = _found(name)
        if found is not None and found.submodule_search_locations is not None:
            name += ".__main__"
            found = _found(name)
            if found is None:
                raise UsageError(f"{self.name!r} is a package without a module __main__: name one of its modules")
        if found is None:
            raise UsageError(f"there is no module {name!r}; install it, or give the path of a script")
        code = _code_of(found, name)
        sys.argv[0] = str(found.origin)
        return code, _names_of(found)

    def _script(self) -> tuple[CodeType, dict[str, Any]]:
        if self.name == "-":
            _first_on_path("")
            from importlib.machinery import BuiltinImporter  # noqa: PLC0415 - what python names here

            names: dict[str, Any] = {"__file__": "<stdin>", "__cached__": None, "__spec__": None, "__package__": None}
            names["__loader__"] = BuiltinImporter
            return compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True), names
        path = os.path.join(Path.cwd(), self.name)  # noqa: PTH118 - as python does, which leaves a `./` in it
        if not Path(path).is_file() or _is_archive(path):
            found = PathFinder.find_spec("__main__", [path])
            if found is not None:
                if sys.flags.safe_path:  # which keeps away the current directory, and not what is asked for by name
                    sys.path.insert(0, path)
                _first_on_path(path)
                return _code_of(found, "__main__"), _names_of(found)
            if Path(path).is_dir():
                raise UsageError(f"the folder {self.name!r} has no __main__.py; give the path of a script")
        _first_on_path(str(Path(self.name).resolve().parent))
        names = {"__file__": path, "__cached__": None, "__spec__": None, "__package__": None}
        if self.name.endswith(".pyc"):
            loader: Any = SourcelessFileLoader("__main__", path)
            return loader.get_code("__main__"), {**names, "__loader__": loader}
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        return code, {**names, "__loader__": SourceFileLoader("__main__", path)}


def _first_on_path(folder: str) -> None:
    """In place of the folder of whatever was run in place of the program."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _found(name: str) -> ModuleSpec | None:
    """A module, whose parents are imported; None: it, or one of them, is not there."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise
    except ValueError:  # a module without a specification, such as __main__
        return None


def _code_of(found: ModuleSpec, name: str) -> CodeType:
    get_code = getattr(found.loader, "get_code", None)
    code: CodeType | None = None if get_code is None else get_code(name)
    if code is None:
        raise UsageError(f"the module {name!r} has no Python code to run: {found.origin}")
    return code


def _names_of(found: ModuleSpec) -> dict[str, Any]:
    return {
        "__file__": found.origin,
        "__cached__": found.cached,
        "__loader__": found.loader,
        "__spec__": found,
        "__package__": found.parent,
    }


def _is_archive(name: str) -> bool:
    """Whether a file is a zip archive, which may have a script before it."""
    import zipfile  # noqa: PLC0415 - for files without a usual name only

    return not name.endswith((".py", ".pyc")) and zipfile.is_zipfile(name)
