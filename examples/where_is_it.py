"""Where do this array's bytes live? `ctxalloc.handler_of` follows an array to whoever owns its memory.

`python examples/where_is_it.py` prints::

    a new array                        aligned64
    a view of it                       aligned64
    a view of the view, transposed     aligned64
    a view by way of a memoryview      aligned64
    a subclass                         aligned64
    one field of a structured array    aligned64
    arithmetic on it, made elsewhere   default_allocator
    a copy of it, made elsewhere       default_allocator
    a file, mapped                     no handler: the system's pages
    someone else's buffer              no handler: a bytearray has it
    resized in place, elsewhere        aligned64
"""

import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

import ctxalloc


class Temperature(np.ndarray[Any, np.dtype[Any]]):
    """A subclass, which changes nothing of where its bytes are."""


def say(what: str, array: npt.NDArray[Any], otherwise: str = "") -> None:
    """Print whose memory an array's bytes are in."""
    handler = ctxalloc.handler_of(array)
    # NumPy itself can be asked too, but only about arrays that own their data; views are None to it.
    numpys_answer = ctxalloc.get_handler_name(array)
    assert numpys_answer is None or (handler is not None and numpys_answer == handler.name)
    print(f"{what:34} {handler.name if handler else f'no handler: {otherwise}'}")


def main() -> None:
    with ctxalloc.use("aligned64"):
        array = np.ones((10, 20))
        records = np.zeros(10, dtype=[("when", "i8"), ("how warm", "f8")])

    say("a new array", array)
    say("a view of it", array[2:5])
    say("a view of the view, transposed", array[2:5].T)
    say("a view by way of a memoryview", np.asarray(array.data))
    say("a subclass", array.view(Temperature))
    say("one field of a structured array", records["how warm"])
    say("arithmetic on it, made elsewhere", array + 1)
    say("a copy of it, made elsewhere", array.copy())
    with tempfile.TemporaryFile() as file:
        say("a file, mapped", np.memmap(file, dtype="f8", shape=10), "the system's pages")
    say("someone else's buffer", np.frombuffer(bytearray(80)), "a bytearray has it")
    array.resize((100, 200), refcheck=False)
    say("resized in place, elsewhere", array)


if __name__ == "__main__":
    main()
