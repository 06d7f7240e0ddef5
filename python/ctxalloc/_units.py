"""Units for sizes, which are ints in bytes everywhere: ``4 * MiB``."""

from typing import Final

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB
