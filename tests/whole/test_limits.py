"""What a limit does to which library: the table of docs/whole.md, each row in a process of its own.

``REFUSED``: the library gets NULL, raises, and is refused at any size on the way. ``GRANTED``: it would not survive
NULL, so it gets its block, and the request ends with BudgetExceeded. In both: the worker lives, nothing stays charged,
and the next request works.
"""

import importlib.util
import textwrap

import pytest
from programs import check

REFUSED = {
    "bytes": "work = lambda: bytes(60 * MiB)",
    "str": "work = lambda: 'x' * (60 * MiB)",
    "list": "work = lambda: [str(n) * 200 for n in range(100_000)]",
    "dict": "work = lambda: {n: n for n in range(1_000_000)}",
    "array": "import array; work = lambda: array.array('d', bytes(60 * MiB))",
    "collections": "import collections; work = lambda: collections.deque(map(str, range(1_000_000)))",
    "json": "text = json.dumps([{'a': n, 'b': 'x' * 50} for n in range(200_000)]); work = lambda: json.loads(text)",
    "pickle": """
        import pickle
        text = pickle.dumps([str(n) * 20 for n in range(300_000)])
        work = lambda: pickle.loads(text)
    """,
    "re": "import re; text = 'ab ' * 2_000_000; work = lambda: re.findall('[a-z]+', text)",
    "csv": "import csv; text = 'some text,2\\n' * 500_000; work = lambda: list(csv.reader(io.StringIO(text)))",
    "zlib": "import zlib; text = zlib.compress(bytes(60 * MiB)); work = lambda: zlib.decompress(text)",
    "bz2": "import bz2; text = bz2.compress(bytes(60 * MiB)); work = lambda: bz2.decompress(text)",
    "lzma": "import lzma; text = lzma.compress(bytes(60 * MiB), preset=0); work = lambda: lzma.decompress(text)",
    "sqlite3": """
        import sqlite3
        def work():
            base = sqlite3.connect(":memory:")
            base.execute("create table t(a)")
            base.executemany("insert into t values(?)", [("x" * 10_000,) for _ in range(5000)])
            return base.execute("select * from t").fetchall()
    """,
    "xml.etree": """
        import xml.etree.ElementTree as tree
        text = "<a>" + "<b c='1'>text</b>" * 300_000 + "</a>"
        work = lambda: tree.fromstring(text)
    """,
    "numpy": "work = lambda: numpy.ones(8 * MiB)",
    "PIL": """
        from PIL import Image
        file = io.BytesIO()
        Image.effect_noise((3000, 2000), 50).convert("RGB").save(file, "JPEG")
        def work():
            file.seek(0)
            return Image.open(file).convert("RGBA").rotate(30)
    """,
    "lxml": """
        from lxml import etree
        text = b"<a>" + b"<b c='1'>text</b>" * 300_000 + b"</a>"
        work = lambda: etree.fromstring(text)
    """,
    "pyarrow.parquet": """
        import pyarrow, pyarrow.parquet
        path = tempfile.mkdtemp() + "/file"
        columns = {name: numpy.random.rand(200_000) for name in "abc"} | {"d": [f"text {n}" for n in range(200_000)]}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        work = lambda: pyarrow.parquet.read_table(path)
    """,
    "scipy": """
        import scipy.ndimage, scipy.sparse
        picture = numpy.random.rand(1000, 1000)
        sparse = scipy.sparse.random(1500, 1500, 0.05, format="csr")
        work = lambda: (scipy.ndimage.gaussian_filter(picture, 3), sparse @ sparse)
    """,
    "sklearn": """
        import sklearn.ensemble
        points, kinds = numpy.random.rand(2000, 5), numpy.random.randint(0, 5, 2000)
        work = lambda: sklearn.ensemble.RandomForestClassifier(10, n_jobs=1).fit(points, kinds)
    """,
    "cv2": """
        import cv2
        cv2.setNumThreads(1)
        picture = numpy.random.randint(0, 255, (2000, 3000, 3), numpy.uint8)
        work = lambda: cv2.cvtColor(cv2.GaussianBlur(cv2.resize(picture, (4000, 3000)), (9, 9), 0), cv2.COLOR_BGR2HSV)
    """,
    "regex": "import regex; text = 'ab ' * 1_000_000; work = lambda: regex.findall('[a-z]+', text)",
    "msgpack": """
        import msgpack
        text = msgpack.packb([{"a": n, "b": "x" * 50} for n in range(200_000)])
        work = lambda: msgpack.unpackb(text)
    """,
    "torch": """
        import torch
        torch.set_num_threads(1)
        pixels = numpy.ones((8, 3, 100, 100), numpy.float32)
        def work():
            flat = torch.nn.Linear(16 * 98 * 98, 10)
            model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), flat)
            pictures = torch.from_numpy(pixels) * 2
            loss = model(pictures).sum() + (pictures.reshape(24, -1) @ torch.rand(10_000, 300)).std()
            loss.backward()
            return loss, torch.linalg.svd(torch.rand(200, 200)), pictures.sort().values
        work()
    """,
}

GRANTED = {
    "pandas": """
        import pandas
        text = "a,b,c\\n" + "1,2.5,some text\\n" * 500_000
        work = lambda: pandas.read_csv(io.StringIO(text)).groupby("c").sum()
    """,
    "pandas.file": """
        import pandas
        pandas.set_option("mode.max_threads", 1)  # from 5 MB on it is read by threads, which are nobody's
        path = tempfile.mkdtemp() + "/file.csv"
        with open(path, "w") as file:
            file.write("a,b\\n" + "".join(f"{n},some text that is {n}\\n" for n in range(300_000)))
        assert os.path.getsize(path) > 7_000_000
        work = lambda: pandas.read_csv(path)
    """,
    "pyarrow": """
        import pyarrow, pyarrow.csv
        text = b"a,b,c\\n" + b"1,2.5,some text\\n" * 500_000
        work = lambda: pyarrow.csv.read_csv(io.BytesIO(text)).group_by("c").aggregate([("a", "sum")])
    """,
    "h5py": """
        import h5py
        path = tempfile.mkdtemp() + "/file"
        with h5py.File(path, "w") as file:
            file.create_dataset("a", data=numpy.random.rand(400_000), chunks=(100_000,), compression="gzip")
        def work():
            with h5py.File(path) as file:
                return file["a"][:]
    """,
    "orjson": "import orjson; text = orjson.dumps(['x' * 50] * 500_000); work = lambda: orjson.loads(text)",
    "pydantic": """
        import pydantic
        reader = pydantic.TypeAdapter(list[dict[str, int]])
        text = reader.dump_json([{"x": n} for n in range(200_000)])
        work = lambda: reader.validate_json(text)
    """,
    "cryptography": """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        cipher, text = AESGCM(bytes(32)), bytes(40 * MiB)
        work = lambda: cipher.encrypt(bytes(12), text, None)
    """,
}

# These are refused their large blocks, and get others: those of C++, and small ones.
PARTLY = {"PIL", "pyarrow.parquet", "sklearn", "cv2", "torch"}
# HDF5 and pandas get their blocks; the arrays that they fill are refused.
EITHER = {"h5py", "pandas", "pandas.file"}
# Errors of their own, which are behind the BudgetExceeded at some of the limits.
OWN_ERRORS = {"lxml": "XMLSyntaxError", "cv2": "error", "xml.etree": "ParseError", "torch": "RuntimeError"}

SWEEP = """
import warnings
warnings.simplefilter("ignore")
causes = set()
try:
    import cv2
except ImportError:
    pass
def at(limit_bytes):
    # The request at this limit, and whether it was refused.
    request = ctxalloc.request(whole=True, limit_bytes=limit_bytes)
    try:
        with request:
            kept = work()
    except Exception as error:
        assert isinstance(error, MemoryError), repr(error)
        causes.add(type(error.__cause__).__name__)
        error.__traceback__ = None
        return request, True
    return request, False

with ctxalloc.request(whole=True) as free:
    kept = work()
need = free.stats.peak_bytes
del kept
for limit in sorted({int(need * part) for part in (0.001, 0.003, 0.01, *[n / 12 for n in range(1, 12)])}):
    request, is_refused = at(limit)
    whole = request.stats.whole
    if EXPECTED == "refused":
        # One small object where Python itself asks, which the request is told of.
        assert whole.granted <= 1 and request.stats.overdraft_bytes == 0, (limit, request.stats)
    if EXPECTED in {"refused", "partly"}:
        more = max(limit // 16, 256 * KiB) + (2 * MiB if EXPECTED == "partly" else 100 * KiB)
        assert request.stats.peak_bytes <= limit + more, (limit, request.stats)
    settled(lambda: request.stats.live_bytes, 1500 * KiB)
request, is_refused = at(need // 3)
assert is_refused, request.stats
if EXPECTED == "granted":
    assert request.stats.whole.granted > 0, request.stats
assert OWN_ERROR is None or OWN_ERROR in causes, causes
request, is_refused = at(need * 2)
assert not is_refused
settled(lambda: request.stats.live_bytes, 1500 * KiB)
"""


def swept(name, work, expected, program=SWEEP):
    if importlib.util.find_spec(name.partition(".")[0]) is None and name not in {"bytes", "str", "list", "dict"}:
        pytest.skip(f"{name} is not installed here")
    constants = f"EXPECTED, OWN_ERROR = {expected!r}, {OWN_ERRORS.get(name)!r}\n"
    check(textwrap.dedent(work) + "\n" + constants + program, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")


@pytest.mark.parametrize("name", REFUSED)
def test_a_library_that_survives_is_refused_at_any_size(name):
    swept(name, REFUSED[name], "partly" if name in PARTLY else "refused")


@pytest.mark.parametrize("name", GRANTED)
def test_a_library_that_would_die_gets_its_block_and_the_request_ends(name):
    swept(name, GRANTED[name], "either" if name in EITHER else "granted")


def test_what_pandas_makes_of_a_refusal_is_one():
    """Its reader loses the MemoryError of `read()`, at a few limits in a hundred."""
    pytest.importorskip("pandas")
    check("""
        import pandas
        text, causes = "1,2.5,some text\\n" * 500_000, set()
        with ctxalloc.request(whole=True) as free:
            pandas.read_csv(io.StringIO(text))
        for limit in range(free.stats.peak_bytes // 10, free.stats.peak_bytes, free.stats.peak_bytes // 60):
            try:
                with ctxalloc.request(whole=True, limit_bytes=limit):
                    pandas.read_csv(io.StringIO(text))
            except ctxalloc.BudgetExceeded as error:
                causes.add(type(error.__cause__).__name__)
        assert "ParserError" in causes, causes
    """)


@pytest.mark.parametrize("name", REFUSED)
def test_a_library_lives_where_small_blocks_have_no_room_either(name):
    """What small blocks have beyond a limit is used up: each sample is refused, wherever it is."""
    swept(
        name,
        REFUSED[name],
        "partly",
        """
for _ in range(60):
    try:
        with ctxalloc.request(whole=True, limit_bytes=400 * KiB):
            held = []
            try:
                while True:
                    held.append(bytes(900))
            except MemoryError:
                pass
            for _ in range(6):
                try:
                    kept = work()
                except Exception as error:
                    error.__traceback__ = None
    except ctxalloc.BudgetExceeded:
        pass
    del held
kept = None
with ctxalloc.request(whole=True, limit_bytes=4 * MiB):
    bytearray(MiB)
""",
    )


@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_no_coder_of_pillow_ends_the_process(kind):
    """At limits that are close enough to refuse each of its blocks, the state of a decoder or encoder too."""
    pytest.importorskip("PIL")
    check(
        """
        from PIL import Image, features
        color = Image.effect_noise((240, 160), 50).convert("RGB")
        grey, few = color.convert("L"), color.convert("P")
        files = [(few, "GIF", {}), (color, "PNG", {}), (color, "JPEG", {}), (grey, "JPEG", {"progressive": True}),
                 (color, "BMP", {}), (few, "BMP", {}), (few, "PCX", {}), (color, "PPM", {}), (color, "SGI", {}),
                 (color, "TGA", {"compression": "tga_rle"}), (grey.convert("1"), "XBM", {}), (color, "TIFF", {}),
                 (color.convert("RGBA"), "DDS", {"pixel_format": "DXT5"})]
        for feature, kept in {
            "jpg_2000": [(color, "JPEG2000", {})],
            "webp": [(color, "WEBP", {})],
            "avif": [(color, "AVIF", {})],
            "libtiff": [(color, "TIFF", {"compression": one}) for one in ("tiff_lzw", "tiff_deflate", "jpeg")]
            + [(grey.convert("1"), "TIFF", {"compression": "group4"}), (grey, "TIFF", {"compression": "packbits"})],
        }.items():
            files += kept if features.check(feature) else []
        for picture, format, options in files:
            file = io.BytesIO()
            picture.save(file, format, **options)
            def reads():
                file.seek(0)
                return Image.open(file).load()
            def writes():
                return picture.save(io.BytesIO(), format, **options)
            work = globals()[KIND]
            with ctxalloc.request(whole=True) as free:
                work()
            for limit in range(4 * KiB, min(free.stats.peak_bytes, 400 * KiB), 3 * KiB):
                try:
                    with ctxalloc.request(whole=True, limit_bytes=limit):
                        work()
                except (MemoryError, OSError, ValueError, SyntaxError, RuntimeError, SystemError) as error:
                    error.__traceback__ = None
    """.replace("KIND", repr(kind))
    )


@pytest.mark.parametrize("work", ["write_table", "batches", "dataset"])
def test_the_writer_of_parquet_gets_its_blocks(work):
    """It has an exception where nobody catches one, or goes on with what it has not got; now and then at one limit."""
    pytest.importorskip("pyarrow")
    check(
        """
        import pyarrow, pyarrow.dataset, pyarrow.parquet
        numbers = range(20_000)
        table = pyarrow.table({
            "number": [n if n % 3 else None for n in numbers],
            "float": numpy.random.rand(len(numbers)),
            "text": [f"text {n}" for n in numbers],
            "list": [[n, None] if n % 5 else None for n in numbers],
            "kinds": pyarrow.array([str(n % 7) for n in numbers]).dictionary_encode(),
        })
        folder = tempfile.mkdtemp()
        def write_table():
            pyarrow.parquet.write_table(table, folder + "/file")
        def batches():
            with pyarrow.parquet.ParquetWriter(folder + "/file", table.schema, compression="zstd") as writer:
                for batch in table.to_batches(3000):
                    writer.write_batch(batch)
        def dataset():
            pyarrow.dataset.write_dataset(
                table, folder + "/files", format="parquet", existing_data_behavior="overwrite_or_ignore"
            )
        work = WORK
        with ctxalloc.request(whole=True) as free:
            work()
        granted = 0
        for _ in range(4):
            for limit in (17_000, *(free.stats.peak_bytes * part // 15 for part in range(1, 15))):
                try:
                    with ctxalloc.request(whole=True, limit_bytes=limit) as request:
                        work()
                except (MemoryError, OSError) as error:
                    error.__traceback__ = None
                granted += request.stats.whole.granted
        assert granted > 0
        work()
    """.replace("WORK", work)
    )


@pytest.mark.parametrize("limit_mib", [0.5, 2, 5, 8, 20])
@pytest.mark.parametrize("name", ["pandas", "sklearn.ensemble", "lxml.etree", "PIL.Image"])
def test_a_library_can_be_imported_after_its_import_passed_a_limit(name, limit_mib):
    pytest.importorskip(name.split(".")[0])
    check(
        f"""
        import importlib
        request = ctxalloc.request(whole=True, limit_bytes=int({limit_mib} * MiB))
        try:
            with request:
                importlib.import_module({name!r})
        except ctxalloc.BudgetExceeded:
            assert request.stats.peak_bytes > {limit_mib} * MiB
        importlib.import_module({name!r})
        """
    )


def test_polars_is_not_seen_and_lives():
    pytest.importorskip("polars")
    check("""
        import polars
        with ctxalloc.request(whole=True, limit_bytes=4 * MiB) as request:
            frame = polars.DataFrame({"a": range(500_000)}).with_columns(b=polars.col("a").cast(str))
        assert frame.height == 500_000 and request.stats.live_bytes < 4 * MiB, request.stats
        with ctxalloc.request(whole=True, limit_bytes=4 * MiB):
            bytearray(MiB)
    """)


def test_a_folder_that_is_named_as_a_survivor_makes_none(tmp_path):
    orjson = pytest.importorskip("orjson")
    import pathlib
    import shutil

    folder = tmp_path / "numpy" / "packages"
    shutil.copytree(pathlib.Path(orjson.__file__).parent, folder / "orjson")
    check(f"""
        sys.path.insert(0, {str(folder)!r})
        import orjson
        assert orjson.__file__.startswith({str(folder)!r})
        text = orjson.dumps(["x" * 50] * 500_000)
        request = refused(lambda: orjson.loads(text), 4 * MiB)
        assert request.stats.whole.granted > 0
    """)
