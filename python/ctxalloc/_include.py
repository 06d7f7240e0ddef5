"""Where the C header of the installed package lies."""

from pathlib import Path


def get_include() -> str:
    """The folder that has ``ctxalloc.h``, for the compiler of an extension module: ``cc -I...``.

    ``pkg-config --cflags ctxalloc`` says the same where ``PKG_CONFIG_PATH`` names the folder ``pkgconfig`` in it.
    """
    return str(Path(__file__).parent / "include")
