"""Modules of a program that are called as one of the standard library's: ``resource.py`` beside a script.

Under ``python`` the script finds its own. Here ctxalloc has imported the library's before the script begins, so that is
forgotten: ctxalloc and NumPy keep theirs, and the program imports its own.
"""

import sys
from importlib.machinery import PathFinder
from typing import Final

_KEPT: Final = frozenset({"__main__", "ctxalloc", "encodings", "numpy", "sitecustomize", "usercustomize"})
"""What ``python`` itself has imported before a program, and what ctxalloc is."""


def forget(folder: str) -> None:
    """Forget each module imported since ``python`` began of whose name the folder has another one."""
    names = list(sys.modules)
    # In the order of their imports. pip's console scripts import `re` before ctxalloc, and `re` others.
    begin = min(names.index(name) for name in ("ctxalloc", "re") if name in names)
    for name in names[begin:]:
        if "." in name or name in _KEPT or name in sys.builtin_module_names:
            continue
        found = PathFinder.find_spec(name, [folder])
        # A folder without __init__.py has no origin, and no module of the standard library gives way to one.
        if found is None or found.origin is None or not found.has_location:
            continue
        known = getattr(sys.modules[name], "__spec__", None)
        if known is None or known.origin in ("frozen", "built-in", found.origin):
            continue
        for module in list(sys.modules):
            if module == name or module.startswith(f"{name}."):
                del sys.modules[module]
