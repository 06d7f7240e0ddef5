"""What arrays of others say of themselves: shared by ``ctxalloc.usm`` and ``ctxalloc.cuda``, which check each field."""

import numpy as np


def is_int(value: object) -> bool:
    """Whether it is an int, of Python's or NumPy's; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def span(address: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> tuple[int, int]:
    """The address of the first byte, and the address after the last. Strides are in bytes."""
    low = behind = address
    if all(shape):
        for length, stride in zip(shape, strides, strict=True):
            reach = (length - 1) * stride
            low, behind = low + min(reach, 0), behind + max(reach, 0)
        behind += item_bytes
    return low, behind
