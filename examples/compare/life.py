"""Conway's Game of Life, as most NumPy courses write it: the neighbours are eight shifted views, summed.

    ctxalloc run --compare --handler pool examples/compare/life.py

Prints how many cells live at the end. Each step makes a dozen arrays of the whole board. An argument: cells a side.
"""

import sys

import numpy as np
from numpy.typing import NDArray


def step(board: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The next generation, on a torus."""
    padded = np.pad(board, 1, mode="wrap")
    neighbours = (
        padded[:-2, :-2]
        + padded[:-2, 1:-1]
        + padded[:-2, 2:]
        + padded[1:-1, :-2]
        + padded[1:-1, 2:]
        + padded[2:, :-2]
        + padded[2:, 1:-1]
        + padded[2:, 2:]
    )
    alive: NDArray[np.bool_] = (neighbours == 3) | ((board == 1) & (neighbours == 2))
    return alive.astype(np.uint8)


if __name__ == "__main__":
    side = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    board = np.random.default_rng(1).integers(0, 2, (side, side), np.uint8)
    for _ in range(40):
        board = step(board)
    print(int(board.sum()))
