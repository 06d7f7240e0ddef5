"""Shapes and indices as users give them."""

import math
import operator

import numpy as np

from ctxalloc.usm._geometry import MAX_AXES, Host


def is_index(one: object) -> bool:
    """Whether it can be used as an int, and is not a bool."""
    if isinstance(one, (bool, np.bool_)):
        return False
    try:
        operator.index(one)  # type: ignore[arg-type]  # whether it can is the question
    except TypeError:
        return False
    return True


def shape_meant(shape: object) -> tuple[int, ...]:
    """The shape that a user means: an int, or several. ValueError: something else, or too many axes."""
    parts = shape if isinstance(shape, (tuple, list)) else (shape,)
    if not all(is_index(part) and int(part) >= 0 for part in parts):
        msg = f"shape={shape!r} is no shape; give an int from 0 up, or a tuple of them"
        raise ValueError(msg)
    if len(parts) > MAX_AXES:
        msg = f"a shape of {len(parts)} axes is too long; NumPy's arrays, and so these, have at most {MAX_AXES}"
        raise ValueError(msg)
    return tuple(int(part) for part in parts)


def reshaped(view: Host, shape: tuple[int, ...]) -> Host:
    """A view with another shape, never a copy: the host may not be able to read the elements.

    AttributeError, ValueError: it would have to be a copy.
    """
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        return np.reshape(view, shape, copy=False)
    view.shape = shape
    return view


def lengths_meant(shape: object, size: int) -> tuple[int, ...]:
    """The shape that a user means, of ``size`` elements; one of its lengths may be -1. ValueError: there is none."""
    parts = shape if isinstance(shape, (tuple, list)) else (shape,)
    if list(parts).count(-1) == 1:
        rest = shape_meant(tuple(part for part in parts if part != -1))
        known = math.prod(rest)
        length = size // known if known and size % known == 0 else 0
        parts = tuple(length if part == -1 else part for part in parts)
    lengths = shape_meant(parts)
    if math.prod(lengths) != size:
        msg = f"{size} elements have no shape {shape}"
        raise ValueError(msg)
    return lengths
