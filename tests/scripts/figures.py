"""A backend of matplotlib without a window: where a script shows its figures, it prints what is in each of them."""

import hashlib

import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

__all__ = ["FigureCanvas", "show"]


def show(*, block: bool | None = None) -> None:
    """Print the size and the hash of every pixel of each open figure, and close them."""
    del block
    for number in plt.get_fignums():
        canvas = plt.figure(number).canvas
        canvas.draw()
        print("figure", number, canvas.get_width_height(), hashlib.sha256(canvas.buffer_rgba()).hexdigest())
    plt.close("all")
