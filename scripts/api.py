"""The public surface, written down in ``tests/api``: no name or signature changes without an entry in the changelog.

``api.py check python`` fails where the package differs from what is written; ``api.py write python`` writes it anew,
and refuses while *Unreleased* in CHANGELOG.md is what it was when the surface was last written. ``api.py check rust
CARGO_PUBLIC_API TOOLCHAIN`` does so for the crate, by cargo-public-api.
"""

import difflib
import hashlib
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SURFACES = ROOT / "tests/api"
_HEADER = "# CHANGELOG.md, Unreleased, when this was written: "


def main() -> None:
    action, language, *tools = sys.argv[1:]
    path = SURFACES / f"{language}.txt"
    surface = sorted(set(python() if language == "python" else rust(*tools)))
    if not surface:
        sys.exit(f"nothing public was found in {language}: the tool and this script do not understand each other")
    written = path.read_text(encoding="utf-8").splitlines() if path.exists() else [_HEADER]
    if surface == written[1:]:
        print(f"{path.relative_to(ROOT)}: {len(surface)} names and signatures, as written")
        return
    difference = [
        line
        for line in difflib.unified_diff(written[1:], surface, "written", "public now", lineterm="", n=0)
        if not line.startswith("@@")
    ]
    print(*difference, sep="\n")
    if action == "check":
        sys.exit(f"{path.relative_to(ROOT)} differs from the code: tell it in CHANGELOG.md, then run `make api`")
    changelog = hashlib.sha256(unreleased().encode()).hexdigest()
    if path.exists() and written[0] == _HEADER + changelog:
        sys.exit("CHANGELOG.md, Unreleased, has no new entry since the surface was written: tell users what changed")
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([_HEADER + changelog, *surface, ""]), encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: written, {len(surface)} names and signatures")


def unreleased() -> str:
    """The changelog's first section."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(r"^## Unreleased.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        sys.exit("CHANGELOG.md has no section 'Unreleased'")
    return section[0]


def python() -> Iterator[str]:
    """Each public name with its signature; a class with its members and bases."""
    if sys.version_info[:2] != (3, 11):
        print(f"not compared: {sys.version.split()[0]} writes signatures in its own way; tests/api has those of 3.11")
        sys.exit()
    sys.path.insert(0, str(ROOT / "scripts/site"))
    stubs = importlib.import_module("stubs").read(ROOT / "python/ctxalloc/_native.pyi")
    pages = importlib.import_module("reference").MODULES  # which a test compares with the package's files
    for name in ("ctxalloc", *(f"ctxalloc.{module}" for module in pages)):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            sys.exit(f"{name} cannot be imported: {error}")
        yield f"{name} (module)"
        for public in module.__all__:
            found = getattr(module, public)
            here = f"{name}.{public}"
            if inspect.ismodule(found):
                continue
            if not isinstance(found, type):
                native = stubs.get(public)
                yield here + (_typed(native) if native and name == "ctxalloc" else _described(found))
                continue
            yield f"{here}({', '.join(base.__name__ for base in found.__bases__)}) (class)"
            yield from _members(here, found, stubs)


def _members(here: str, found: type, stubs: dict) -> Iterator[str]:
    native = found.__module__ == "ctxalloc._native" or not inspect.isfunction(getattr(found, "__init__", None))
    if native and found.__name__ in stubs:
        yield f"{here}.__new__{_typed(stubs[found.__name__])}"
    # What an unpublished base of ours brings is as public as the class.
    ours = [base for base in found.__mro__ if base is found or base.__module__.startswith("ctxalloc")]
    for name, kind in {name: kind for base in ours for name, kind in inspect.get_annotations(base).items()}.items():
        if not name.startswith("_"):
            yield f"{here}.{name}: {kind if isinstance(kind, str) else inspect.formatannotation(kind)}"
    for name, member in {name: member for base in reversed(ours) for name, member in vars(base).items()}.items():
        special = name in (
            "__init__",
            "__new__",
            "__call__",
            "__enter__",
            "__aenter__",
            "__getitem__",
            "__iter__",
            "__len__",
        )
        if name.startswith("_") and not (special and inspect.isfunction(member)):
            continue
        stub = stubs.get(f"{found.__name__}.{name}")
        yield f"{here}.{name}" + (_typed(stub) if stub else _described(member))


def _typed(native: object) -> str:
    signature, kind = native
    if signature is None:
        return f": {kind}"
    arguments, returned = signature
    return f"{arguments} -> {returned}" if returned else arguments


def _described(found: object) -> str:
    found = getattr(found, "__func__", found)
    if isinstance(found, property):
        found = found.fget
        returned = inspect.signature(found).return_annotation
        return f": {returned if isinstance(returned, str) else inspect.formatannotation(returned)}"
    if callable(found):
        try:
            return str(inspect.signature(found))
        except ValueError:
            return "(...)"
    return ""  # a constant's value is no promise


def rust(tool: str, toolchain: str) -> Iterator[str]:
    """Of the crate with every feature that a Rust program uses, without the implementations of automatic traits."""
    features = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))["features"]
    wanted = ",".join(sorted(features.keys() - {"default", "python", "abi3", "whole"}))
    run = subprocess.run(
        [
            tool,
            "--omit",
            "blanket-impls,auto-trait-impls,auto-derived-impls",
            "--features",
            wanted,
        ],
        cwd=ROOT,
        env={**os.environ, "RUSTUP_TOOLCHAIN": toolchain},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        sys.exit(f"cargo-public-api failed:\n{run.stderr}")
    yield from run.stdout.splitlines()


if __name__ == "__main__":
    main()
