"""Refuses to be imported in a subinterpreter, before anything else of ctxalloc is.

Handlers live for the process, and Python's objects for them in the main interpreter: its event hook, its ``atexit``,
its NumPy. One made in a subinterpreter would go with it, and ctxalloc would be deaf to Python from then on.
"""

import importlib
from types import ModuleType


def _interpreters() -> ModuleType | None:
    """CPython's own module for it, which has had two names; None where a build leaves it out (then Rust looks)."""
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
