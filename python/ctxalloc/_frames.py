"""What an exception keeps alive, how to let go of it, and what it came from.

Used by ``_serving`` for requests of a server and by ``_tasks`` for tasks of clusters.
"""

import contextlib
import inspect
import opcode
import sys
from types import FrameType
from typing import Final

_SUSPENDS: Final = (
    inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
)
_YIELD: Final = opcode.opmap["YIELD_VALUE"]
_CLOSES: Final = sys.version_info < (3, 13)
"""``frame.clear()`` closes a coroutine that is suspended; later versions raise RuntimeError."""


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error that has left its task or request, and of those that it came from.

    Whoever keeps the error (a worker does so in a cycle with its own frame) keeps the arrays in these frames: they
    would stay charged, and others would be refused because of them.
    """
    for one in _all_of(error):
        step = one.__traceback__
        while step is not None:
            if not (_CLOSES and _is_suspended(step.tb_frame)):
                with contextlib.suppress(RuntimeError):  # those that still run stay as they are
                    step.tb_frame.clear()
            step = step.tb_next


def drop_tracebacks(error: BaseException) -> None:
    """Have an error that was handled, and those that it came from, refer to no frame.

    A frame refers to all that called it, the server's included, also when they are over: whoever keeps the error would
    keep what these have.
    """
    for one in _all_of(error):
        one.__traceback__ = None


def _all_of(error: BaseException) -> list[BaseException]:
    """An error and those that it came from."""
    found: list[BaseException] = []
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.append(one)
        errors += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            errors += one.exceptions
    return found


def _is_suspended(frame: FrameType) -> bool:
    """Whether a coroutine or a generator may go on: one that caught the error, and waits while another thread answers.

    One that has ended where an exception was thrown into its ``yield`` cannot be told from it.
    """
    code = frame.f_code
    return bool(code.co_flags & _SUSPENDS) and code.co_code[frame.f_lasti] == _YIELD


def leaves_of(error: BaseException) -> list[BaseException]:
    """What an exception says that it comes from: what its group has, and what it was raised from.

    Task groups wrap what their tasks raise, and ``raise ... from error`` says that ``error`` is the reason. An
    exception that was raised while another one was handled (``__context__``) says no such thing.
    """
    leaves: list[BaseException] = []
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, BaseExceptionGroup):
            waiting += reversed(one.exceptions)
        elif isinstance(one, MemoryError) or not isinstance(one, Exception) or one.__cause__ is None:
            leaves.append(one)
        else:
            waiting.append(one.__cause__)
    return leaves or [error]
