"""Sizes are ints in bytes everywhere; these make them readable: ``4 * MiB``."""

from typing import Final

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB
