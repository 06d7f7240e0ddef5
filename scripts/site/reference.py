"""The Python reference: a page for each public module, made by autodoc from the package as it is imported."""

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

# What belongs together is found together; `check` says which name is in none of these.
TOPICS = {
    "Give work an account and a limit": [
        "request",
        "Request",
        "current_request",
        "Stats",
        "WholeStats",
        "Escaped",
        "detached",
    ],
    "Limit several requests together": ["Budget", "Reclaimer", "ready"],
    "Select an allocator": ["use", "Scope", "set_handler", "reset", "Token", "current", "wrap", "ThreadPoolExecutor"],
    "Find out where an array lives": [
        "handler_of", "handler", "handlers", "Handler", "get_handler_name", "get_handler_version",
        "shared_memory_of", "SharedBlock",
    ],
    "Register an allocator": ["register", "adopt", "get_include"],
    "See": [
        "coverage", "Coverage", "request_metrics", "RequestMetrics", "profile_on_signal", "set_event_hook",
        "record", "Recorder", "tracemalloc_domain", "load_ipython_extension", "unload_ipython_extension",
    ],
    "Set": ["configure", "trim", "process_initializer"],
    "Exceptions and warnings": [
        "BudgetExceeded", "NoRoom", "RequestEnded", "TaskBudgetExceeded", "RegistrationError", "UnknownHandlerError",
        "RustPanic", "RouteWarning",
    ],
    "Constants": ["KiB", "MiB", "GiB", "__version__"],
}  # fmt: skip

MODULES = {
    "asgi": "Starlette, FastAPI and other ASGI applications",
    "fastapi": "An account as a dependency of FastAPI",
    "wsgi": "Flask and other WSGI applications",
    "django": "Django",
    "problems": "Answers to refusals",
    "dask": "Dask",
    "ray": "Ray",
    "celery": "Celery",
    "metrics": "Counters",
    "prometheus": "Counters for Prometheus",
    "opentelemetry": "Counters for OpenTelemetry",
    "strategies": "Strategies",
    "tracking": "Which blocks are alive",
    "usm": "SYCL's unified shared memory",
    "cuda": "CUDA's pinned and managed memory",
}

# Where names of a module are explained, if it shares them with another one.
_EARLIER = {"ctxalloc.ray": ("ctxalloc.dask",)}


def write(folder: Path) -> None:
    """Writes the pages."""
    folder.mkdir(parents=True)
    (folder / "index.rst").write_text(_index(), encoding="utf-8")
    (folder / "ctxalloc.rst").write_text(_package(), encoding="utf-8")
    for module, title in MODULES.items():
        (folder / f"{module}.rst").write_text(_module(f"ctxalloc.{module}", title), encoding="utf-8")


def public_names() -> set[str]:
    """All that `__all__` of the package and of its public modules promises."""
    names = set()
    for module in ("ctxalloc", *(f"ctxalloc.{module}" for module in MODULES)):
        loaded = importlib.import_module(module)
        names |= {f"{module}.{name}" for name in loaded.__all__}
    return names


def check(inventory: Path) -> list[str]:
    """What the reference lacks, and what it should not have."""
    from sphinx.util.inventory import InventoryFile  # noqa: PLC0415 - only in the site's environment

    with inventory.open("rb") as file:
        known = InventoryFile.load(file, "", lambda _base, uri: uri)
    documented = {name for kind, names in known.items() if kind.startswith("py:") for name in names}
    public = public_names()
    private = {
        name for name in documented if any(part.startswith("_") and part != "__version__" for part in name.split("."))
    }
    # A class's home may be a file of its own: its members and it are listed there too, and lead to the public page.
    private -= {name for name in private if _public_part(name) in {known.rpartition(".")[2] for known in public}}
    return [f"the reference lacks {name}" for name in sorted(public - documented)] + [
        f"the reference has {name}" for name in sorted(private)
    ]


def _public_part(name: str) -> str:
    """``Report`` of ``ctxalloc._outcome.Report`` and of its members; empty where a class or a member is private."""
    parts = name.split(".")[1:]
    after = parts[1:] if parts and parts[0].startswith("_") else parts
    return "" if any(part.startswith("_") for part in after) or not after else after[0]


def _index() -> str:
    pages = "\n".join(f"   {module}" for module in ("ctxalloc", *MODULES))
    return f"Python reference\n================\n\n.. toctree::\n   :maxdepth: 1\n\n{pages}\n"


def _module(name: str, title: str) -> str:
    heading = f"{name}: {title}"
    module = importlib.import_module(name)
    elsewhere = {
        public: other
        for public in module.__all__
        for other in _EARLIER.get(name, ())
        if getattr(importlib.import_module(other), public, None) is getattr(module, public)
    }
    lines = [heading, "=" * len(heading), "", f".. automodule:: {name}", "   :members:", "   :undoc-members:"]
    data = [public for public in module.__all__ if not _is_explained(getattr(module, public))]
    if hidden := sorted({*elsewhere, *data, *_inherited(module)}):
        lines += [f"   :exclude-members: {', '.join(hidden)}"]
    for public, other in elsewhere.items():
        lines += ["", f".. py:class:: {public}", "", f"   The same as :py:class:`{other}.{public}`."]
    for public in data:
        lines += [
            "",
            f".. autodata:: {public}",
            "   :no-index-entry:",
            "",
            *(f"   {line}" for line in _said(name, public)),
        ]
    return "\n".join([*lines, ""])


def _is_explained(found: object) -> bool:
    return isinstance(found, type) or inspect.isroutine(found)


def _said(module: str, name: str) -> list[str]:
    """The docstring below an assignment, in this module or in the one that it imports the name from."""
    from sphinx.pycode import ModuleAnalyzer  # noqa: PLC0415 - only in the site's environment

    loaded = importlib.import_module(module)
    for other in sorted(key for key in sys.modules if key.startswith("ctxalloc._")):
        if getattr(sys.modules[other], name, None) is getattr(loaded, name) and not other.endswith("._native"):
            docs = ModuleAnalyzer.for_module(other).find_attr_docs()
            if ("", name) in docs:
                return docs["", name]
    return []


def _inherited(module: ModuleType) -> set[str]:
    """Another library's members, which autodoc finds in its sources: they are that library's to explain."""
    found = set()
    for name in module.__all__:
        for base in getattr(getattr(module, name), "__mro__", ())[1:]:
            if not base.__module__.startswith(("ctxalloc", "builtins")):
                found |= vars(base).keys() - vars(getattr(module, name)).keys()
    return {name for name in found if not name.startswith("_")}


def _package() -> str:
    package = importlib.import_module("ctxalloc")
    lines = ["ctxalloc", "========", "", ".. currentmodule:: ctxalloc", ""]
    for topic, names in TOPICS.items():
        lines += [topic, "-" * len(topic), ""]
        for name in names:
            found = getattr(package, name)
            if isinstance(found, type):
                lines += [f".. autoclass:: {name}", "   :members:", "   :undoc-members:", ""]
            elif callable(found):
                lines += [f".. autofunction:: {name}", ""]
            else:
                lines += [f".. autodata:: {name}", ""]
    modules = [name for name in package.__all__ if name in MODULES]
    lines += ["Modules", "-------", ""]
    for name in modules:
        lines += [f"- :doc:`ctxalloc.{name} <{name}>`: {MODULES[name]}"]
    return "\n".join([*lines, ""])
