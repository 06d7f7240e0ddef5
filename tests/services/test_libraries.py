"""docs/coverage.md on other libraries, for those that are installed: whether what they return is in the request."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ctxalloc

PICTURE = np.random.default_rng(1).integers(0, 255, (400, 600, 3), dtype=np.uint8)
NUMBERS = PICTURE.astype(np.float64)


def seen(make: Callable[[], Any], array: Callable[[Any], Any] = lambda made: made) -> bool:
    """Whether the bytes of what is made are in the request: all or none."""
    make()  # what is made once only
    with ctxalloc.request() as scope:
        made = make()
        shown = array(made)
        live, own = scope.stats.live_bytes, ctxalloc.handler_of(shown) == scope.handler
    assert shown.nbytes > 100_000
    assert own == (live >= shown.nbytes)
    return own


def test_opencv_is_seen() -> None:
    cv2 = pytest.importorskip("cv2")
    png = cv2.imencode(".png", PICTURE)[1]
    assert seen(lambda: cv2.GaussianBlur(PICTURE, (5, 5), 0))
    assert seen(lambda: cv2.resize(PICTURE, (300, 200)))
    assert seen(lambda: cv2.imdecode(png, 1))


def test_scipy_and_scikits_are_seen() -> None:
    scipy = pytest.importorskip("scipy")
    assert seen(lambda: scipy.ndimage.gaussian_filter(NUMBERS, 2))
    assert seen(lambda: scipy.fft.fft(NUMBERS.ravel()))
    filters = pytest.importorskip("skimage.filters")
    assert seen(lambda: filters.sobel(NUMBERS[..., 0]))
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    assert seen(lambda: preprocessing.StandardScaler().fit_transform(NUMBERS.reshape(-1, 3)))


def test_pillows_own_images_are_not_seen_and_copies_are() -> None:
    image = pytest.importorskip("PIL.Image").fromarray(PICTURE)
    assert not seen(lambda: np.asarray(image))
    assert seen(lambda: np.array(image))


def test_pandas_numbers_are_seen_and_arrow_is_not(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    series = pandas.Series(NUMBERS.ravel())
    assert seen(lambda: series + series, lambda made: made.to_numpy())
    text = "\n".join(["a", *map(str, range(50_000))])
    assert seen(lambda: pandas.read_csv(io.StringIO(text)), lambda made: made["a"].to_numpy())
    pytest.importorskip("pyarrow")
    path = tmp_path / "numbers.parquet"
    pandas.DataFrame({"a": NUMBERS.ravel()}).to_parquet(path)
    assert not seen(lambda: pandas.read_parquet(path), lambda made: made["a"].to_numpy())


def test_numba_and_pickles_are_not_seen() -> None:
    assert not seen(lambda: pickle.loads(pickle.dumps(NUMBERS, 5)))
    parts: list[Any] = []
    text = pickle.dumps(NUMBERS, 5, buffer_callback=parts.append)
    assert not seen(lambda: pickle.loads(text, buffers=[bytearray(part) for part in parts]))
    numba = pytest.importorskip("numba")
    assert not seen(numba.njit(lambda: np.ones(100_000)))


def test_files_are_seen_where_they_are_read_and_not_where_they_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "numbers.npy"
    np.save(path, NUMBERS)
    assert seen(lambda: np.load(path))
    assert not seen(lambda: np.load(path, mmap_mode="r"))
