"""What is done to pictures, in plain NumPy and SciPy. Nothing here knows of handlers: that is the point.

Each function hands every array it makes to ``made`` at once, one operation a statement, so that a caller can look at
them all; ``made`` gives them back. Operations are exact, or the same for every alignment, so that two handlers
give the same bytes. Neighbour: ``pipelines`` puts these together.
"""

import io
import struct
import zlib
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from scipy import ndimage

Picture = npt.NDArray[np.uint8]
"""Height x width x 3, red green blue."""

Floats = npt.NDArray[np.float32]

MAX_PIXELS: Final = 2_000_000
MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA")

_A = TypeVar("_A", bound=npt.NDArray[Any])


# What PIL raises for files that are cut off or garbled.
_BROKEN: Final = (OSError, SyntaxError, EOFError, IndexError, ValueError, struct.error, zlib.error)


class Made(Protocol):
    """Told of every array, gives it back."""

    def __call__(self, array: _A, /) -> _A: ...


class PictureError(ValueError):
    """These bytes are not a picture that the service accepts; the message says why."""


class PictureTooLargeError(PictureError):
    """A picture with too many pixels."""


def decode(body: bytes, made: Made) -> Picture:
    """The picture in a PNG or JPEG file, transparent parts on white. PictureError, PictureTooLargeError."""
    # `np.asarray` would give an array over PIL's bytes: memory that no handler ever made.
    rgba = made(np.array(_read(body)))
    rgb = made(rgba[:, :, :3].copy())
    transparent = made(rgba[:, :, 3] < 255)
    if transparent.any():
        alpha = made(rgba[:, :, 3:] / np.float32(255))
        paint = made(rgb * alpha)
        white = made((1 - alpha) * np.float32(255))
        rgb = made(made(paint + white).astype(np.uint8))
    return rgb


def encode(picture: Picture) -> bytes:
    """A PNG file. PIL's own memory is not NumPy's: no arrays are made here."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG", compress_level=1)
    return file.getvalue()


def _read(body: bytes) -> Image.Image:
    try:
        with Image.open(io.BytesIO(body), formats=("PNG", "JPEG")) as file:
            _check(file)
            return file.convert("RGBA")
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        raise PictureError("the body is no PNG or JPEG picture") from error
    except Image.DecompressionBombError as error:
        raise PictureTooLargeError(str(error)) from error
    except _BROKEN as error:
        raise PictureError(f"the picture is broken: {error}") from error


def _check(file: Image.Image) -> None:
    width, height = file.size
    if width * height > MAX_PIXELS:
        raise PictureTooLargeError(
            f"the picture has {width} x {height} pixels; this service takes at most {MAX_PIXELS} in all"
        )
    if file.mode not in MODES:
        raise PictureError(f"pixels of mode {file.mode!r} are not taken; send 8 bits a channel, grey or RGB")


def luminance(picture: Picture, made: Made) -> Floats:
    """How bright each pixel is, 0 to 255 (ITU-R BT.601)."""
    red = made(picture[:, :, 0] * np.float32(0.299))
    green = made(picture[:, :, 1] * np.float32(0.587))
    blue = made(picture[:, :, 2] * np.float32(0.114))
    return made(made(red + green) + blue)


def to_bytes(values: Floats, made: Made) -> Picture:
    """Rounded, clipped to 0..255; a grey picture becomes one of three equal channels."""
    rounded = made(np.rint(values))
    clipped = made(np.clip(rounded, 0, 255))
    narrow = made(clipped.astype(np.uint8))
    return narrow if narrow.ndim == 3 else made(np.repeat(narrow[:, :, None], 3, axis=2))


def shrink(picture: Picture, factor: int, made: Made) -> Picture:
    """Every ``factor``-th pixel of every ``factor``-th line."""
    view = made(picture[::factor, ::factor])
    return made(np.ascontiguousarray(view))


def unsharp(picture: Picture, blurred: Picture, made: Made) -> Picture:
    """The picture with its difference from a blurred one added."""
    detail = made(np.subtract(picture, blurred, dtype=np.float32))
    stronger = made(detail * np.float32(1.5))
    return to_bytes(made(picture + stronger), made)


def edges(picture: Picture, made: Made) -> Picture:
    """How steep the brightness is (Sobel), white where it is very steep."""
    grey = luminance(picture, made)
    across = made(ndimage.sobel(grey, axis=1))
    down = made(ndimage.sobel(grey, axis=0))
    steep = made(np.hypot(across, down))
    scale = np.float32(2.5 * 255) / max(steep.max(), np.float32(1))
    return to_bytes(made(steep * scale), made)


def histogram(values: Picture, made: Made) -> npt.NDArray[np.int64]:
    """How often each of the 256 values occurs."""
    flat = made(values.reshape(-1))
    return made(np.bincount(flat, minlength=256))


def equalizing_table(counts: npt.NDArray[np.int64], made: Made) -> Floats:
    """For each brightness, the one that makes all equally frequent."""
    below = made(np.cumsum(counts))
    total = max(int(below[-1]), 1)
    return made((below * (255.0 / total)).astype(np.float32))


def brightened(picture: Picture, grey: Picture, table: Floats, made: Made) -> Picture:
    """The picture with each pixel's brightness changed by ``table``, its colour kept."""
    wanted: Floats = made(table[grey])
    present = made(np.maximum(grey, 1).astype(np.float32))
    gain = made(wanted / present)
    return to_bytes(made(picture * made(gain[:, :, None])), made)


def total_variation(picture: Picture, made: Made, *, weight: float = 30.0, rounds: int = 10) -> Floats:
    """The picture without its noise (Chambolle, 2004): few edges, each kept sharp. Heavy, and many arrays."""
    noisy = made(picture.astype(np.float32))
    across, down = made(np.zeros_like(noisy)), made(np.zeros_like(noisy))
    step = np.float32(0.25)
    clean = noisy
    for _ in range(rounds):
        divergence = made(across + down)
        divergence[:, 1:] -= across[:, :-1]
        divergence[1:] -= down[:-1]
        clean = made(noisy + divergence)
        right, below = made(np.zeros_like(clean)), made(np.zeros_like(clean))
        np.subtract(clean[:, 1:], clean[:, :-1], out=right[:, :-1])
        np.subtract(clean[1:], clean[:-1], out=below[:-1])
        length: Floats = made(np.hypot(right, below))
        shorter: Floats = made(1 + made(length * (step / np.float32(weight))))
        across = made(np.divide(made(across + made(right * step)), shorter))
        down = made(np.divide(made(down + made(below * step)), shorter))
    return clean


def summary(counts: npt.NDArray[np.int64], made: Made) -> dict[str, float]:
    """Mean, spread, median and entropy of values from their histogram."""
    total = int(counts.sum())
    values = made(np.arange(256))
    share = made(counts / total)
    mean = float(made(values * share).sum())
    off = made(values - mean)
    variance = float(made(made(off * off) * share).sum())
    median = int(np.searchsorted(made(np.cumsum(counts)), (total + 1) // 2))
    used = made(share[share > 0])
    entropy = -float(made(used * made(np.log2(used))).sum())
    numbers = {"mean": mean, "deviation": variance**0.5, "median": float(median), "entropy_bits": entropy}
    return {name: round(number, 6) for name, number in numbers.items()}
