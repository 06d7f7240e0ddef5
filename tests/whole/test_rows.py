"""How much of what a request makes its account shows: at least 90 % of what the process grows by, for each library.

The growth is of anonymous resident memory, in a process of its own: in a block of code, and in a service's request.
What is made once (imports, caches) is made before.
"""

import textwrap

import pytest
from programs import check

ROWS = {
    "pandas str": """
        import pandas
        work = lambda: pandas.Series([f"text {n}" for n in range(1_500_000)], dtype="str")
    """,
    "pandas read_csv": """
        import pandas
        text = "a,b\\n" + "some text,another text\\n" * 500_000
        work = lambda: pandas.read_csv(io.StringIO(text))
    """,
    "pyarrow read_parquet": """
        import pyarrow, pyarrow.parquet
        path = tempfile.mkdtemp() + "/file"
        columns = {name: numpy.random.rand(1_500_000) for name in "abcde"}
        pyarrow.parquet.write_table(pyarrow.table(columns), path, use_dictionary=False)
        del columns
        work = lambda: pyarrow.parquet.read_table(path)
    """,
    "pyarrow read_csv": """
        import pyarrow, pyarrow.csv
        text = b"a,b\\n" + b"1.5,some text that is long\\n" * 1_000_000
        work = lambda: pyarrow.csv.read_csv(io.BytesIO(text))
    """,
    "PIL": "from PIL import Image; work = lambda: Image.new('RGB', (6000, 4000), (1, 2, 3))",
    "PIL of one column": "from PIL import Image; work = lambda: Image.new('RGB', (1, 2_000_000), (1, 2, 3))",
    "PIL thumbnails": """
        from PIL import Image
        work = lambda: [Image.new("RGB", (64, 64), (1, 2, 3)) for _ in range(4000)]
    """,
    "numpy": "work = lambda: numpy.ones(6_000_000)",
    "pickle": """
        import pickle
        text = pickle.dumps(numpy.ones(6_000_000), 5)
        work = lambda: pickle.loads(text)
    """,
    "object array": "work = lambda: numpy.array([f'text {n}' for n in range(500_000)], object)",
    "json": """
        text = json.dumps([{"a": n, "b": f"text {n}"} for n in range(150_000)])
        work = lambda: json.loads(text)
    """,
    "small objects": "work = lambda: [[n] for n in range(1_000_000)]",
    "orjson": """
        import orjson
        text = orjson.dumps([{"a": n, "b": f"text {n}"} for n in range(150_000)])
        work = lambda: orjson.loads(text)
    """,
    "pydantic": """
        import pydantic
        class Model(pydantic.BaseModel):
            a: int
            b: str
        work = lambda: [Model(a=n, b=f"text {n}") for n in range(100_000)]
    """,
    "lxml": """
        from lxml import etree
        text = b"<a>" + b"<b c='1'>text</b>" * 300_000 + b"</a>"
        work = lambda: etree.fromstring(text)
    """,
    "sqlite3 fetchall": """
        import sqlite3
        base = sqlite3.connect(tempfile.mkdtemp() + "/file", check_same_thread=False)
        base.execute("create table t(a, b)")
        base.executemany("insert into t values(?, ?)", ((n, f"text {n}") for n in range(400_000)))
        base.commit()
        work = lambda: base.execute("select * from t").fetchall()
    """,
    "sklearn forest": """
        import sklearn.ensemble
        points, kinds = numpy.random.rand(20_000, 10), numpy.random.randint(0, 5, 20_000)
        work = lambda: sklearn.ensemble.RandomForestClassifier(20, n_jobs=1).fit(points, kinds)
    """,
    "cv2": """
        import cv2
        picture = numpy.random.randint(0, 255, (4000, 6000, 3), numpy.uint8)
        work = lambda: cv2.GaussianBlur(picture, (5, 5), 0)
    """,
}

# Rows with less than nine tenths. Of read_csv's table each byte is seen; the rest is what the heaps of Arrow's own
# threads keep of their temporary memory (mimalloc's, which is nobody's). Of a forest's nodes too; the rest is what the
# arrays had before they were shrunk, in place. In a service's thread 2 MiB of pandas' row are Python's: of arenas whose
# other objects were freed, and the event loop's were not.
REST = {"pyarrow read_csv": 0.6, "sklearn forest": 0.75, "pandas str": 0.85}

MEASURE = """
def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Anonymous:"))

def trimmed():
    # What was freed goes back to the system: what remains is alive.
    gc.collect()
    ctxalloc.trim()
    import ctypes
    ctypes.CDLL(None).malloc_trim(0)
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()
"""

ALONE = """
with ctxalloc.request(whole=True):
    work()  # what is made once, and the heaps' own tables
trimmed()
before = anonymous()
with ctxalloc.request(whole=True) as request:
    kept = work()
time.sleep(0.3)  # Arrow's threads let go
trimmed()
live, growth = request.stats.live_bytes, anonymous() - before
print(live, growth)
"""

# By the application's own step, and in a thread as frameworks run plain functions. Another request goes on meanwhile.
SERVED = """
from ctxalloc.asgi import AllocatorMiddleware

kept, measured, others = {}, {}, []

async def app(scope, receive, send):
    if scope["path"] == "/other":
        while not kept.get("done"):
            others.append(bytearray(5_000))
            del others[:-10]
            await asyncio.sleep(0.01)
        return
    before = anonymous()
    result = await asyncio.to_thread(work) if scope["path"] == "/thread" else work()
    await asyncio.sleep(0.3)  # Arrow's threads let go
    trimmed()
    measured[scope["path"]] = ctxalloc.current_request().stats.live_bytes, anonymous() - before
    del result

async def main():
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}
    async def send(message):
        pass
    service = AllocatorMiddleware(app, default=ctxalloc.request(whole=True))
    def asked(path):
        scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "query_string": b"", "headers": []}
        return service(scope, receive, send)
    other = asyncio.create_task(asked("/other"))
    for _ in range(3):  # what is made once, and the heaps' own tables, is made in the first two
        for path in ("/step", "/thread"):
            await asked(path)
            trimmed()
    kept["done"] = True
    await other
asyncio.run(main())
print(*measured["/step"], *measured["/thread"])
"""


@pytest.mark.parametrize("name", ROWS)
def test_nine_tenths_of_the_growth_are_seen(name):
    checked(name, ["a process"], ALONE)


@pytest.mark.parametrize("name", ROWS)
def test_nine_tenths_of_the_growth_are_seen_in_a_service(name):
    checked(name, ["a service", "a service's thread"], SERVED)


def checked(name, places, program):
    module = name.split()[0]
    if module in {"pandas", "pyarrow", "PIL", "orjson", "pydantic", "lxml", "sklearn", "cv2"}:
        pytest.importorskip(module)
    numbers = list(map(int, check(textwrap.dedent(ROWS[name]) + "\n" + MEASURE + program)))
    assert len(numbers) == 2 * len(places)
    for place, live, growth in zip(places, numbers[::2], numbers[1::2], strict=True):
        print(f"| {name} | {place} | {live / 2**20:.1f} / {growth / 2**20:.1f} | {live / max(growth, 1):.0%} |")
        assert live > 5 << 20
        assert live >= REST.get(name, 0.9) * growth, place
