"""What an exception keeps alive, how to let go of it, and what it came from.

Used by ``_serving`` for requests of a server and by ``_tasks`` for tasks of clusters.
"""

import traceback


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error that has left its task or request, and of those that it came from.

    Whoever keeps the error (a worker does so in a cycle with its own frame) keeps the arrays in these frames: they
    would stay charged, and others would be refused because of them.
    """
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)  # those that still run stay as they are
        errors += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            errors += one.exceptions


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
