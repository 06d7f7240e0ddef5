"""docs/coverage.md on other libraries: whether what they return is in the request.

`make test-libraries` has all of them; in another environment those that are installed are measured.
"""

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


def test_opencvs_umats_are_not_seen() -> None:
    cv2 = pytest.importorskip("cv2")

    def blurred() -> Any:
        return cv2.GaussianBlur(cv2.UMat(PICTURE), (5, 5), 0)

    blurred()
    with ctxalloc.request() as scope:
        made = blurred()
        assert scope.stats.live_bytes < 10_000
        assert ctxalloc.handler_of(made.get()) == scope.handler


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
    frame = pandas.DataFrame({"a": NUMBERS.ravel(), "key": np.arange(NUMBERS.size) % 20_000})
    assert seen(lambda: frame.groupby("key").sum(), lambda made: made["a"].to_numpy())
    assert seen(lambda: frame.sort_values("a"), lambda made: made["a"].to_numpy())
    pytest.importorskip("pyarrow")
    path = tmp_path / "numbers.parquet"
    frame.to_parquet(path)
    assert not seen(lambda: pandas.read_parquet(path), lambda made: made["a"].to_numpy())


def test_texts_of_pandas_are_arrows_or_pythons() -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    words = [f"a word that is long enough to be an object of its own: {number}" for number in range(20_000)]

    def taken(make: Callable[[], Any]) -> tuple[int, str]:
        make()
        with ctxalloc.request() as scope:
            made = make()
            live = scope.stats.live_bytes
        return live, str(made.dtype)

    live, kind = taken(lambda: pandas.Series(words))
    assert kind == "str"
    assert live < 10_000, "the texts are Arrow's"
    live, kind = taken(lambda: pandas.Series(words, dtype=object))
    assert kind == "object"
    assert 8 * len(words) <= live < 10 * len(words), "a pointer for each; the texts are Python's"


def test_arrow_and_polars_are_not_seen_and_their_copies_are() -> None:
    arrow = pytest.importorskip("pyarrow")
    assert not seen(lambda: arrow.array(NUMBERS.ravel()), lambda made: made.to_numpy())
    column = arrow.chunked_array([NUMBERS.ravel(), NUMBERS.ravel()])
    assert not seen(lambda: arrow.compute.add(column, column).chunk(0), lambda made: made.to_numpy())
    polars = pytest.importorskip("polars")
    series = polars.Series("a", NUMBERS.ravel())
    assert not seen(lambda: series + series, lambda made: made.to_numpy())
    assert seen(lambda: (series + series).to_numpy(writable=True))


def test_what_h5py_reads_is_seen(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "numbers.h5", "w") as file:
        file["a"] = NUMBERS
        assert seen(lambda: file["a"][:])


def test_sparse_matrices_are_seen() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.random(2000, 2000, density=0.05, format="csr", random_state=1)
    assert seen(lambda: matrix * 2.0, lambda made: made.data)
    assert seen(lambda: matrix @ matrix, lambda made: made.data)


def square(rows: Any) -> Any:
    return rows * rows


def test_what_comes_back_from_another_process_is_not_seen() -> None:
    joblib = pytest.importorskip("joblib")
    with joblib.parallel_config(backend="loky", n_jobs=1):
        parallel = joblib.Parallel(n_jobs=2)
        assert not seen(lambda: parallel([joblib.delayed(square)(NUMBERS)]), lambda made: made[0])


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
