"""The pictures that are posted: photographs that come inside scikit-image's wheel, so no network is needed.

Colour, grey, transparent and JPEG: the files as they are. Neighbour: ``client`` posts them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import skimage

FILES: Final = (
    "astronaut.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "ihc.png",
    "logo.png",
    "rocket.jpg",
)


def pictures() -> Mapping[str, bytes]:
    """File name -> the file's bytes. FileNotFoundError: this scikit-image no longer ships them."""
    folder = Path(skimage.__file__).parent / "data"
    return {name: (folder / name).read_bytes() for name in FILES}
