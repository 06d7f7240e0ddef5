"""Imports of optional libraries, with a message that names the install."""

import importlib
from typing import Any


def need(module: str, purpose: str, install: str) -> Any:
    """The module. ImportError: it is not installed; the message says what for, and how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something of its own
        raise ModuleNotFoundError(
            f"{purpose} needs {module!r}, which is not installed: pip install {install}", name=module
        ) from None
