"""Signatures and types of functions, methods and properties, as the native module's stubs or a module have them.

So a type has the name that its author gave it, and not what that stands for.
"""

import ast
from pathlib import Path
from typing import NamedTuple


class Native(NamedTuple):
    """One name of the stubs: how it is called, with what it returns, or a property's type."""

    signature: tuple[str, str | None] | None
    type: str | None


def read(path: Path) -> dict[str, Native]:
    """By name: ``request``, ``Budget``, ``Budget.limit_bytes``."""
    found: dict[str, Native] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = Native(_signature(node), None)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = Native(None, ast.unparse(node.annotation))
        elif isinstance(node, ast.ClassDef):
            _read_class(node, found)
    return found


def unqualified(name: str) -> str:
    """``ctxalloc.Budget.id`` as the stubs have it: ``Budget.id``. Other modules' names are in no stub."""
    _, dot, rest = name.partition(".")
    return rest if dot else ""


def _read_class(node: ast.ClassDef, found: dict[str, Native]) -> None:
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            found[f"{node.name}.{member.target.id}"] = Native(None, ast.unparse(member.annotation))
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
        if "property" in decorators:
            found[f"{node.name}.{member.name}"] = Native(None, ast.unparse(member.returns) if member.returns else None)
        elif member.name in ("__new__", "__init__"):
            arguments, _ = _signature(member)
            found[node.name] = Native((arguments, None), None)
        elif not any(decorator.endswith(".setter") for decorator in decorators):
            found[f"{node.name}.{member.name}"] = Native(_signature(member), None)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str | None]:
    """Without ``self`` and ``cls``."""
    arguments = node.args
    for names in (arguments.posonlyargs, arguments.args):
        if names and names[0].arg in ("self", "cls"):
            del names[0]
            break
    return f"({ast.unparse(arguments)})", ast.unparse(node.returns) if node.returns else None
