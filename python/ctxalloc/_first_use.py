"""Modules that are imported when they are first used, for no request, and a fork that waits for it.

Python holds a lock of each module while that is imported, and a child of ``fork`` has the lock without the thread that
would let it go: it would wait for ever where it uses the module. Whoever writes ``ctxalloc.strategies`` does not expect
an import there.
"""

import importlib
import os
import threading
import time
from types import ModuleType
from typing import Final

from ctxalloc._native import use

_PATIENCE_SECONDS: Final = 1.0
"""No longer: what is imported may itself wait for the thread that forks."""

_importing: Final[list[int]] = []
"""The threads that import something, each as often as it does."""


def imported(name: str) -> ModuleType:
    """The module of the package with this name. It outlives the request that happens to be the first to use it."""
    here = threading.get_ident()
    _importing.append(here)
    try:
        with use("default_allocator"):
            return importlib.import_module(f"ctxalloc.{name}")
    finally:
        _importing.remove(here)


def _wait_for_others() -> None:
    here, until = threading.get_ident(), time.monotonic() + _PATIENCE_SECONDS
    while any(thread != here for thread in _importing) and time.monotonic() < until:
        time.sleep(0.001)


def _forget_the_parents() -> None:
    here = threading.get_ident()
    _importing[:] = [thread for thread in _importing if thread == here]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_others, after_in_child=_forget_the_parents)
