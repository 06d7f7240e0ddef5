"""The frames that an exception keeps alive, and how to let go of what they hold.

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
