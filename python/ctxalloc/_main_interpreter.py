"""Raises ImportError in a subinterpreter, before anything else of ctxalloc is imported.

Handlers live as long as the process. What they use of Python belongs to the main interpreter: the event hook,
``atexit``, NumPy. If they used those of a subinterpreter, they would have none after its end.
"""

import importlib
from types import ModuleType


def _interpreters() -> ModuleType | None:
    """CPython's module for interpreters, which has had two names; None in a build without it (then Rust checks)."""
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


_found = _interpreters()
if _found is not None and _found.get_current() != _found.get_main():
    raise ImportError(
        "ctxalloc works in the main interpreter only, and this is a subinterpreter: import it in the main one, and use "
        "threads, asyncio tasks or processes (multiprocessing, ProcessPoolExecutor) in place of subinterpreters"
    )
