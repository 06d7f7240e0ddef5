"""How ``replay`` and ``recommend`` end early.

Ctrl-C never breaks off what is told, so nothing that was measured is lost; SIGTERM and SIGHUP end the process that
replays too. A signal is noted, and obeyed where the work waits (``waiting``) or asks (``check``). A second Ctrl-C is
obeyed at once.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Final

_ENDS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class StoppedError(Exception):
    """The user has interrupted it."""


class Ending:
    """The handler of these signals."""

    def __init__(self) -> None:
        self._ends: int | None = None
        self._is_stopped = False
        self._is_waiting = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Takes the signals in here that would end this process, and none that somebody else has."""
        self._ends, self._is_stopped, self._is_waiting = None, False, False
        found: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDS)}
        ours = [number for number, its in found.items() if its in (signal.SIG_DFL, signal.default_int_handler)]
        for number in ours:
            signal.signal(number, self)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, found[number])  # type: ignore[arg-type] # what was there

    def __call__(self, number: int, _frame: object) -> None:
        """What ``check`` raises. KeyboardInterrupt: it is the second Ctrl-C."""
        if number != signal.SIGINT:
            self._ends = number
        elif self._is_stopped and not self._is_waiting:
            raise KeyboardInterrupt
        else:
            self._is_stopped = True
        if self._is_waiting:
            self._is_waiting = False
            self.check()

    def check(self) -> None:
        """Obeys what has come. StoppedError: Ctrl-C; SystemExit: this process is ended."""
        if self._ends is not None:
            sys.exit(128 + self._ends)
        if self._is_stopped:
            raise StoppedError

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What takes long, and can be broken off anywhere: ``check`` is done whenever a signal comes."""
        self._is_waiting = True
        try:
            self.check()
            yield
        finally:
            self._is_waiting = False


ENDING: Final = Ending()
"""There is one command in a process at a time."""
