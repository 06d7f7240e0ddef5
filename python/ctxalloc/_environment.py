"""What the environment selects when the package is imported."""

import os

from ctxalloc._errors import UnknownHandlerError
from ctxalloc._native import set_handler

#: The name of a handler that is there from the start.
HANDLER = "CTXALLOC_HANDLER"


def select() -> None:
    """Select the handler that the environment names, in the context that imports the package.

    ImportError: there is none of that name; it lists those there are.
    """
    name = os.environ.get(HANDLER)
    if not name:
        return
    try:
        set_handler(name)
    except UnknownHandlerError as error:
        raise ImportError(f"the environment says {HANDLER}={name!r}, but {error}") from None
