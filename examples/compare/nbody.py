"""Gravity between all pairs of bodies, by broadcasting, as the well-known NumPy n-body simulations do it.

    ctxalloc run --compare --handler pool examples/compare/nbody.py

Prints the energy at the end. Each step makes ten arrays of a number for each pair. An argument: how many bodies.
"""

import sys

import numpy as np
from numpy.typing import NDArray


def acceleration(
    position: NDArray[np.float64], mass: NDArray[np.float64], softening: float = 0.1
) -> NDArray[np.float64]:
    """Of each body, from all others."""
    x, y, z = (position[:, axis : axis + 1] for axis in range(3))
    dx, dy, dz = x.T - x, y.T - y, z.T - z
    inverse_cube = (dx**2 + dy**2 + dz**2 + softening**2) ** -1.5
    return np.hstack([(dx * inverse_cube) @ mass, (dy * inverse_cube) @ mass, (dz * inverse_cube) @ mass])


if __name__ == "__main__":
    bodies = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    draw = np.random.default_rng(1)
    mass = np.full((bodies, 1), 20.0 / bodies)
    position, velocity = draw.standard_normal((bodies, 3)), draw.standard_normal((bodies, 3))
    for _ in range(20):
        velocity += acceleration(position, mass) * 0.01
        position += velocity * 0.01
    print(f"{0.5 * float((mass * velocity**2).sum()):.6f}")
