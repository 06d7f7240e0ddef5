"""What the environment selects when the package is imported."""

import os

from ctxalloc._errors import UnknownHandlerError
from ctxalloc._native import set_handler

#: The variable; its value is the name of a built-in handler.
HANDLER = "CTXALLOC_HANDLER"


def count_the_whole() -> None:
    """Counts native memory and objects for requests that ask for it, if the environment says so."""
    if os.environ.get("CTXALLOC_WHOLE"):
        from ctxalloc import _whole  # noqa: PLC0415 - most programs do not need it

        _whole.enable_from_environment()


def select() -> None:
    """Select the handler that the environment names, in the context that imports the package.

    ImportError: there is no handler of that name; the message lists those that there are.
    """
    name = os.environ.get(HANDLER)
    if not name:
        return
    try:
        set_handler(name)
    except UnknownHandlerError as error:
        raise ImportError(f"the environment says {HANDLER}={name!r}, but {error}") from None
