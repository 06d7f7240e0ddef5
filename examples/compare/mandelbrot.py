"""The Mandelbrot set, as most NumPy courses draw it: a plane of complex numbers, squared until they escape.

    ctxalloc run --compare --handler pool examples/compare/mandelbrot.py

Prints how many points belong to the set. Each step makes several arrays of the whole plane. An argument: points a side.
"""

import sys

import numpy as np


def mandelbrot(side: int, steps: int = 30) -> int:
    """How many points of a square of the plane stay within 2."""
    real = np.linspace(-2.25, 0.75, side)
    imaginary = np.linspace(-1.25, 1.25, side)
    plane = real + imaginary[:, None] * 1j
    points = np.zeros_like(plane)
    escaped_at = np.full(plane.shape, steps)
    for step in range(steps):
        is_inside = np.abs(points) < 2
        points = np.where(is_inside, points * points + plane, points)
        escaped_at = np.where(is_inside, escaped_at, np.minimum(escaped_at, step))
    return int((escaped_at == steps).sum())


if __name__ == "__main__":
    print(mandelbrot(int(sys.argv[1]) if len(sys.argv) > 1 else 3000))
