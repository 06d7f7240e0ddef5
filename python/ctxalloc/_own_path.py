"""``ctxalloc`` as a command imports the standard library's modules, not those of the program or of ``PYTHONPATH``.

Imported before anything else of the package: the standard library is then first on ``sys.path``, and a ``json.py`` of
the program is neither executed nor used by ctxalloc. Before the program begins, ``restore`` makes ``sys.path`` what
``python`` would have made it, and ``_shadowed`` has the program find its own modules.
"""

import os
import sys

TYPE_CHECKING = False  # as type checkers know it: `typing` may be the program's
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_before: "list[str] | None" = None
"""What ``sys.path`` was; None: nothing was changed, or it was restored."""

aside: "dict[str, ModuleType]" = {}
"""Modules of those names that ``python`` itself, or a console script, had imported from there before ctxalloc."""


def _runs_as_module() -> bool:
    """Whether this is ``python -m ctxalloc``, whose module is being looked for."""
    is_asked = "-mctxalloc" in sys.orig_argv or ("-m", "ctxalloc") in zip(
        sys.orig_argv, sys.orig_argv[1:], strict=False
    )
    return sys.argv[:1] == ["-m"] and is_asked


def _runs_as_script() -> bool:
    """Whether the program is a console script of the command's: all that are made import ``ctxalloc._command``."""
    frame = sys._getframe()  # noqa: SLF001 - documented, for CPython
    while frame.f_back is not None:
        frame = frame.f_back
    return "ctxalloc._command" in frame.f_code.co_names


def _set_aside(folders: "Sequence[str]") -> None:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in sys.stdlib_module_names or name == "__main__":
            continue
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.has_location and str(spec.origin).startswith(tuple(folders)):
            aside[name] = sys.modules.pop(name)


def _standard_first() -> None:
    global _before  # noqa: PLW0603 - a program has one path
    standard = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib would be imported for it
    if standard not in sys.path:  # in an archive, and nobody else's modules come before it
        return
    _before = list(sys.path)
    begin = ends = sys.path.index(standard)
    folders = [folder + os.sep for folder in sys.path[:begin] if folder and not standard.startswith(folder + os.sep)]
    while ends < len(sys.path) and sys.path[ends].startswith(standard) and "site-packages" not in sys.path[ends]:
        ends += 1
    if not sys.flags.safe_path and _runs_as_module():
        _before[0] = os.path.dirname(sys.executable)  # noqa: PTH120 - as above; `_program` replaces it
    sys.path[:] = [*_before[begin:ends], *_before[:begin], *_before[ends:]]
    _set_aside(folders)


def restore() -> None:
    """Make ``sys.path`` what it was. What was put there since stays, at the end."""
    global _before  # noqa: PLW0603 - as above
    if _before is not None:
        sys.path[:] = [*_before, *(folder for folder in sys.path if folder not in _before)]
        _before = None


def shadowing() -> "list[str]":
    """The folders whose modules come before the standard library's, once ``sys.path`` is the program's."""
    standard = os.path.dirname(os.__file__)  # noqa: PTH120 - as above
    return sys.path[: sys.path.index(standard)] if standard in sys.path else sys.path[:1]


if _runs_as_module() or _runs_as_script():
    _standard_first()
    from ctxalloc import _starting

    _starting.begin()
