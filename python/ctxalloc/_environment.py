"""What the environment selects when the package is imported."""

import atexit
import os

from ctxalloc._errors import UnknownHandlerError
from ctxalloc._native import _stop_recording, set_handler

#: The variable; its value is the name of a built-in handler.
HANDLER = "CTXALLOC_HANDLER"

#: The signal that starts a profile (``USR2``), how long it is, and the file's name: see ``profile_on_signal``.
SIGNAL, SECONDS, FILE = "CTXALLOC_PROFILE_SIGNAL", "CTXALLOC_PROFILE_SECONDS", "CTXALLOC_PROFILE_FILE"


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


def listen() -> None:
    """Profile on the signal that the environment names. ImportError: it, or the rest, is not of use."""
    name = os.environ.get(SIGNAL)
    if not name:
        return
    import signal  # noqa: PLC0415 - for those who ask

    from ctxalloc._on_signal import profile_on_signal  # noqa: PLC0415 - as above

    found = getattr(signal, f"SIG{name.removeprefix('SIG')}", None)
    if not isinstance(found, signal.Signals):
        raise ImportError(  # noqa: TRY004 - as for the rest of the environment
            f"the environment says {SIGNAL}={name!r}, but there is no such signal; give one like USR2"
        )
    seconds = os.environ.get(SECONDS) or "10"
    try:
        number = float(seconds)
    except ValueError:
        raise ImportError(f"the environment says {SECONDS}={seconds!r}; give a number of seconds") from None
    try:
        profile_on_signal(found, seconds=number, path=os.environ.get(FILE) or "ctxalloc.html")
    except (ValueError, OSError) as error:
        raise ImportError(f"the environment says {SIGNAL}={name!r}, but {error}") from None


def record() -> None:
    """Complete the recording that ``CTXALLOC_RECORD`` or the program began when the interpreter exits.

    The first request begins what the environment asks for.
    """
    atexit.register(_stop_recording)
