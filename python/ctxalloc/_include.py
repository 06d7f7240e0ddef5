"""Where the C header of the installed package is."""

from pathlib import Path


def get_include() -> str:
    """The folder of ``ctxalloc.h``, for the compiler of an extension module: ``cc -I...``.

    ``pkg-config --cflags ctxalloc`` prints the same if ``PKG_CONFIG_PATH`` names the folder ``pkgconfig`` in it.
    """
    return str(Path(__file__).parent / "include")
