"""Modules of a program that are called as one of the standard library's: ``resource.py`` beside a script.

Under ``python`` the script finds its own. Here ctxalloc has imported the library's before the script begins, so that is
forgotten: ctxalloc and NumPy keep theirs, and the program imports its own.
"""

import sys
from importlib.machinery import PathFinder
from typing import Final

from ctxalloc import _own_path

_KEPT: Final = frozenset({"__main__", "ctxalloc", "encodings", "numpy", "sitecustomize", "usercustomize"})
"""What ``python`` itself has imported before a program, and what ctxalloc is."""


def forget() -> None:
    """Forget each module imported since ``python`` began of whose name ``sys.path`` has another one first."""
    folders = _own_path.shadowing()
    names = list(sys.modules)
    # In the order in which their imports ended: `site` ends when what an installation imports by itself is there. With
    # -S `runpy` may be next, or `re`, which pip's console scripts import.
    ends = names.index("site") + 1 if "site" in names else 0
    begin = ends or min(names.index(name) for name in ("ctxalloc", "re", "runpy") if name in names)
    for name in names[begin:]:
        if "." in name or name in _KEPT or name in sys.builtin_module_names:
            continue
        found = PathFinder.find_spec(name, folders)
        # A folder without __init__.py has no origin, and no module of the standard library gives way to one.
        if found is None or found.origin is None or not found.has_location:
            continue
        known = getattr(sys.modules[name], "__spec__", None)
        if known is None or known.origin in ("frozen", "built-in", found.origin):
            continue
        for module in list(sys.modules):
            if module == name or module.startswith(f"{name}."):
                del sys.modules[module]
    # What was executed before ctxalloc began is not executed again.
    for name, set_aside in _own_path.aside.items():
        found = PathFinder.find_spec(name.partition(".")[0], folders)
        top = _own_path.aside.get(name.partition(".")[0])
        if found is not None and top is not None and top.__spec__ is not None and found.origin == top.__spec__.origin:
            sys.modules[name] = set_aside
    _own_path.aside.clear()
