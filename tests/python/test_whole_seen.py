"""What is seen of whole requests: their parts, at the peak and now; what is nobody's; metrics, the page, reports."""

import gzip
import json
import os
import re
import subprocess
import sys

import pytest
from c_extensions import compiler
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]


def test_the_parts_at_the_peak_are_what_was_alive_then():
    check("""
        with ctxalloc.request(whole=True) as request:
            array, kept, block = numpy.ones(MiB), bytearray(5 * MiB), libc.malloc(3 * MiB)
            del array, kept
            libc.free(block)
            later = bytearray(2 * MiB)
            whole, stats = request.stats.whole, request.stats
        assert whole.peak_bytes == stats.peak_bytes
        parts = whole.array_at_peak_bytes, whole.native_at_peak_bytes, whole.object_at_peak_bytes
        assert sum(parts) == whole.peak_bytes
        assert 8 * MiB <= parts[0] < 8 * MiB + 1000, parts
        assert 3 * MiB <= parts[1] < 3 * MiB + 200 * KiB and 5 * MiB < parts[2] < 5 * MiB + 300 * KiB, parts
        assert whole.array_bytes == 0 and 2 * MiB < whole.object_bytes < 2 * MiB + 300 * KiB
        after = request.stats.whole
        assert pickle.loads(pickle.dumps(after)) == after and "array_at_peak_bytes=8388" in repr(after)
        assert pickle.loads(pickle.dumps(request.stats)) == request.stats
    """)


def test_parts_of_a_request_inside_are_parts_of_the_one_around_it():
    check("""
        with ctxalloc.request(whole=True) as outer:
            with ctxalloc.request() as middle, ctxalloc.request(whole=True) as inner:
                kept, block = bytearray(5 * MiB), libc.malloc(3 * MiB)
            for request in outer, inner:
                whole = request.stats.whole
                assert whole.array_bytes == 0, whole
                assert 5 * MiB <= whole.object_bytes < 6 * MiB and 3 * MiB <= whole.native_bytes < 4 * MiB, whole
            block = libc.realloc(block, 4 * MiB)  # of who lets it grow, since its own has ended
            assert 4 * MiB <= outer.stats.whole.native_bytes < 5 * MiB and inner.stats.whole.native_bytes < 200 * KiB
            libc.free(block)
            del kept
            assert outer.stats.live_bytes < MiB and outer.stats.whole.native_at_peak_bytes >= 3 * MiB
        with ctxalloc.request(root=True, whole=True) as apart:
            more = bytearray(MiB)
        assert outer.stats.live_bytes < 600 * KiB
    """)


def test_a_request_says_what_was_nobodys_while_it_ran():
    check("""
        before = bytearray(9 * MiB)
        def elsewhere(size):
            import contextvars  # in no request, also where threads inherit their context
            thread = threading.Thread(target=contextvars.Context().run, args=(lambda: bytearray(size),))
            thread.start()
            thread.join()
        with ctxalloc.request(whole=True) as request:
            elsewhere(7 * MiB)
            assert 7 * MiB <= request.stats.whole.nobodys_bytes < 8 * MiB, request.stats
        elsewhere(20 * MiB)
        assert request.stats.whole.nobodys_bytes < 8 * MiB
        seen = ctxalloc.coverage()
        assert seen.nobodys_bytes == sum(seen.nobodys_by_thread.values()) >= 27 * MiB
        assert seen.nobodys_by_thread["threads of Python"] >= 27 * MiB, seen
        bytearray(5 * MiB)
        more = ctxalloc.coverage().nobodys_by_thread
        assert 5 * MiB <= more["the main thread"] - seen.nobodys_by_thread.get("the main thread", 0) < 6 * MiB
        with ctxalloc.request(), ctxalloc.use("pool"):
            bytearray(6 * MiB)
        assert ctxalloc.coverage().nobodys_bytes - sum(more.values()) >= 6 * MiB
    """)


def test_small_blocks_of_nobody_are_estimated():
    check("""
        ctxalloc.request(whole=True)
        before = ctxalloc.coverage().nobodys_bytes
        import itertools
        kept = [bytes(64) for _ in itertools.repeat(None, 200_000)]  # range would make numbers, before Python 3.14
        made = ctxalloc.coverage().nobodys_bytes - before
        assert 19 * MiB < made < 26 * MiB, made  # of 21.4, and the list
    """)


def test_where_nothing_is_counted_nobodys_bytes_are_none():
    program = "import ctxalloc; seen = ctxalloc.coverage(); print(seen.nobodys_bytes, seen.nobodys_by_thread)"
    variables = {**os.environ, "LD_PRELOAD": "", "CTXALLOC_WHOLE": ""}
    ended = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert ended.stdout == "None None\n"


POOL = """
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
static const char *named;
static void *work(void *size) {
    if (named) prctl(PR_SET_NAME, named);
    void *volatile block = malloc((size_t)size);
    free(block);
    return (void *)&named;  /* no tail call: this function must be on the stack */
}
void run(const char *name, size_t size) {
    pthread_t thread;
    named = name;
    pthread_create(&thread, NULL, work, (void *)size);
    pthread_join(thread, NULL);
}
"""


def test_a_librarys_threads_are_told_by_their_name_or_its_file(tmp_path):
    command = compiler()
    if command is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "pool.c", tmp_path / "libpool.so"
    source.write_text(POOL)
    subprocess.run([*command, "-O1", "-shared", "-fPIC", "-o", library, source, "-lpthread"], check=True)
    check(
        """
        pool = ctypes.CDLL(sys.argv[1])
        pool.run.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        with ctxalloc.request(whole=True) as request:
            pool.run(None, 3 * MiB)
            pool.run(b"reader-1", 5 * MiB)
            pool.run(b"reader-2", 6 * MiB)
        found = ctxalloc.coverage().nobodys_by_thread
        assert 3 * MiB <= found["libpool.so"] < 4 * MiB, found
        assert 11 * MiB <= found["reader in libpool.so"] < 12 * MiB, found
        assert 14 * MiB <= request.stats.whole.nobodys_bytes < 15 * MiB
        """,
        str(library),
    )


def test_metrics_say_which_figures_are_whole():
    printed = check("""
        import prometheus_client, ctxalloc.prometheus
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        reader = InMemoryMetricReader()
        ctxalloc.opentelemetry.instrument(MeterProvider([reader]))
        prometheus_client.REGISTRY.register(ctxalloc.prometheus.Collector())
        for size in 3, 4:
            with ctxalloc.request(whole=True, name="decode"):
                kept = bytearray(size * MiB), numpy.ones(MiB)
                del kept
        with ctxalloc.request(name="arrays"):
            numpy.ones(MiB)
        series = ctxalloc.metrics.snapshot().series
        decode, arrays = series["decode"], series["arrays"]
        scalars = decode.whole_array_bytes - 16 * MiB
        assert 0 <= scalars < 1000
        assert (decode.requests, decode.whole_requests, decode.whole_array_bytes) == (2, 2, 16 * MiB + scalars)
        assert 7 * MiB <= decode.whole_object_bytes < 8 * MiB and decode.whole_native_bytes < MiB
        parts = decode.whole_array_bytes + decode.whole_native_bytes + decode.whole_object_bytes
        assert parts == decode.peak_bytes.sum
        assert arrays[-4:] == (0, 0, 0, 0)
        print(prometheus_client.generate_latest().decode())
        metrics = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        found = {metric.name: metric.data.data_points for metric in metrics}
        assert found["ctxalloc.request.memory.part"][0].value == 16 * MiB + scalars
        points = {point.attributes["ctxalloc.request.name"]: point.value for point in found["ctxalloc.request.whole"]}
        assert points == {"decode": 2, "arrays": 0}
        assert {point.attributes["ctxalloc.thread"] for point in found["ctxalloc.memory.nobodys"]}
    """)
    assert 'ctxalloc_requests_whole_total{name="decode"} 2.0' in printed
    assert 'ctxalloc_requests_whole_total{name="arrays"} 0.0' in printed
    assert 'ctxalloc_request_memory_part_bytes_total{name="decode",part="arrays"} 1.6777' in printed
    assert 'ctxalloc_memory_nobodys_bytes{thread="the main thread"}' in printed


def test_the_page_and_on_end_have_the_parts():
    check("""
        from ctxalloc import _page
        from ctxalloc.asgi import AllocatorMiddleware
        reports = []
        async def app(scope, receive, send):
            kept = bytearray(3 * MiB), numpy.ones(MiB)
            shown = _page.numbers()["live"][0]
            assert 0 <= shown["whole"]["arrays"] - 8 * MiB < 1000 and shown["whole"]["objects"] >= 3 * MiB, shown
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        served = AllocatorMiddleware(
            app, routes={"/decode": ctxalloc.request(whole=True)}, on_end=lambda scope, report: reports.append(report))
        async def main():
            async def receive():
                return {"type": "http.request", "body": b"", "more_body": False}
            async def send(message):
                pass
            await served({"type": "http", "method": "GET", "path": "/decode", "headers": []}, receive, send)
            await asyncio.sleep(0.3)
        asyncio.run(main())
        (report,) = reports
        whole = report.stats.whole
        assert 0 <= whole.array_at_peak_bytes - 8 * MiB < 1000 and whole.object_at_peak_bytes >= 3 * MiB, whole
        outside = bytearray(2 * MiB)  # large, so exact: small blocks are seen by a sample
        data = json.loads(json.dumps(_page.numbers()))
        (route,) = [one for one in data["routes"] if one["name"] == "/decode"]
        assert 0 <= route["whole"]["arrays"] - 8 * MiB < 1000 and route["whole"]["objects"] >= 3 * MiB
        assert data["memory"]["nobodys_by_thread"]["the main thread"] > 0
    """)


NATIVE = r"native memory: 19\.[0-3] MiB"
"""SCRIPT's 20 MB, and what Python itself takes: small blocks, of which each sample stands for 32 KiB and more."""
SCRIPT = """
import ctypes, json, threading
import numpy
libc = ctypes.PyDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
def native():
    return [libc.malloc(100_000) for _ in range(200)]
def words():
    return [str(number) * 3 for number in range(200_000)]
def failing():
    try:
        raise ValueError
    except ValueError:
        return [bytearray(50_000) for _ in range(40)]
kept = native(), words(), numpy.ones(3_000_000), failing()
thread = threading.Thread(target=lambda: bytearray(7 << 20))
thread.start()
thread.join()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def reported(script, *options):
    command = [sys.executable, "-m", "ctxalloc", "run", "--whole", *options, script]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_report_has_sites_of_native_memory_and_objects(script, tmp_path):
    reported(script, "--report=json", "--output", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    mebi = 1 << 20
    sites = {(one["part"], one["where"].split()[-1].split(".")[0]): one["at_peak_bytes"] for one in report["sites"]}
    assert sites["arrays", "<module>"] == 24_000_000
    assert sites["native memory", "native"] == 20_000_000
    assert 12 * mebi < sites["objects", "words"] < 21 * mebi
    assert 40 * 50_001 <= sites["objects", "failing"] < 41 * 50_001 + 30_000
    parts, whole = report["parts"], report["whole"]
    assert (
        parts["objects"]["at_peak_bytes"] + parts["native memory"]["at_peak_bytes"] + 24_000_000
        == report["all"]["at_peak_bytes"]
    )
    assert whole["array_at_peak_bytes"] == 24_000_000
    assert abs(report["all"]["peak_bytes"] - whole["peak_bytes"]) < mebi
    assert abs(sum(one["at_peak_bytes"] for one in report["sites"]) - report["all"]["at_peak_bytes"]) == 0
    assert whole["nobodys_bytes"] >= 0
    assert isinstance(whole["nobodys_by_thread"], dict)


def test_a_report_as_text_has_the_parts_and_what_was_nobodys(script):
    printed = reported(script, "--report").stderr
    assert re.search(NATIVE + " at the peak", printed), printed
    for text in ("together: ", "the whole program: ", "charged to nobody: "):
        assert text in printed, printed
    rows = [line.split() for line in printed.splitlines() if "script.py:" in line]
    assert any("native memory" in " ".join(row) and row[-1].startswith("native") for row in rows), printed


@pytest.mark.parametrize("suffix", ["folded", "html", "pb.gz"])
def test_graphs_have_the_part_around_the_calls(script, tmp_path, suffix):
    path = tmp_path / f"report.{suffix}"
    reported(script, f"--report={path}")
    content = path.read_bytes()
    if suffix == "folded":
        assert b"\nnative memory;<module> (" in content
        assert b"\nobjects;<module> (" in content
    elif suffix == "html":
        assert re.search(NATIVE.encode(), content)
        assert b"Arrays, native memory and objects: " in content
    else:
        assert b"native memory" in gzip.decompress(content)


def test_a_report_of_arrays_only_is_as_before(script, tmp_path):
    command = [sys.executable, "-m", "ctxalloc", "run", "--report=json", "--output", tmp_path / "one.json", script]
    subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads((tmp_path / "one.json").read_text())
    assert report["parts"] == {}
    assert report["whole"] is None
    assert all("part" not in site for site in report["sites"])
    whole = tmp_path / "two.json"
    reported(script, "--report=json", "--output", whole)
    compare = [sys.executable, "-m", "ctxalloc", "compare", tmp_path / "one.json", whole]
    compared = subprocess.run(compare, capture_output=True, text=True, check=True).stdout
    assert "of it native memory" in compared


def test_a_profile_survives_threads_fork_and_deep_stacks(script):
    script.write_text("""
import json, os, threading
text = json.dumps([{"a": number, "b": ["x" * 40] * 5} for number in range(2000)])
def deep(left):
    return deep(left - 1) if left else json.loads(text)
def work():
    for _ in range(30):
        kept = [deep(50), bytearray(5000), [str(n) for n in range(1000)]]
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
[thread.join() for thread in threads]
print("fine")
""")
    assert reported(script, "--report").stdout == "fine\n"


# Of each part in each kind of code that has a line: the comment says how many KiB a line has at the peak.
LINES = """
import asyncio, ctypes
import numpy
libc = ctypes.PyDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
kept = []
kept.append(bytearray(100 << 10))  # objects 100
def function():
    kept.append(
        bytearray(200 << 10),  # objects 200
    )
    libc.malloc(300 << 10)  # native memory 300
def comprehension():
    return [
        bytearray(40 << 10)  # objects 400
        for _ in range(10)
    ]
def nested():
    return {
        key: [bytearray(50 << 10) for _ in range(2)]  # objects 500
        for key in range(5)
    }
def generator():
    for _ in range(6):
        yield bytearray(100 << 10)  # objects 600
def handled():
    try:
        {}["absent"]
    except KeyError:
        kept.append(bytearray(700 << 10))  # objects 700
    finally:
        libc.malloc(150 << 10)  # native memory 150
class Body:
    held = bytearray(800 << 10)  # objects 800
    def __enter__(self):
        kept.append(numpy.ones(900 << 10, "u1"))  # arrays 900
    def __exit__(self, *error):
        libc.malloc(250 << 10)  # native memory 250
    @property
    def value(self):
        return bytearray(1000 << 10)  # objects 1000
async def task():
    await asyncio.sleep(0)
    kept.append(bytearray(1100 << 10))  # objects 1100
async def tasks():
    await asyncio.gather(task(), asyncio.to_thread(threaded))
def threaded():
    kept.append(libc.malloc(1200 << 10))  # native memory 1200
function(); kept += [comprehension(), nested(), list(generator())]; handled()
with Body() as body:
    pass
kept.append(Body().value)
kept.extend(map(lambda size: bytearray(size << 10), [1300]))  # objects 1300
asyncio.run(tasks())
"""


def test_sites_have_the_line_of_python_that_made_them(script, tmp_path):
    script.write_text(LINES)
    reported(script, "--report=json", "--output", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    found = {}
    for site in report["sites"]:
        file, _, line = site["where"].split()[0].rpartition(":")
        if file.endswith("script.py"):
            key = int(line), site["part"]
            found[key] = found.get(key, 0) + site["at_peak_bytes"]
    expected = {}
    for number, text in enumerate(LINES.splitlines(), 1):
        _, is_marked, mark = text.partition("  # ")
        if is_marked:
            part, _, size_kib = mark.rpartition(" ")
            expected[number, part] = int(size_kib) << 10
    assert len(expected) == 15
    large = {key: size for key, size in found.items() if size > 80 << 10}
    assert large.keys() == expected.keys(), (large, expected)
    for key, size in expected.items():
        assert size <= large[key] <= size + (60 << 10), (key, size, large[key])


def test_threads_that_end_soon_are_sampled_as_a_long_one_is():
    check("""
        import threading
        def once(work, *arguments):
            thread = threading.Thread(target=ctxalloc.wrap(work), args=arguments)
            thread.start()
            thread.join()
        kept, warm, count = [], [None] * 60, 1500
        def work():
            mine = warm.copy()
            for n in range(60):
                mine[n] = (n + 1_000_000,)  # a tuple of 48 bytes, and an int of 32
            kept.append(mine)
        once(len, [])
        with ctxalloc.request(whole=True) as request:
            for _ in range(count):
                once(work)
        stats, alive = request.stats, count * (60 * 80 + 560)
        assert abs(stats.live_bytes - alive) < 6 * stats.whole.error_bytes, (stats, alive)
    """)
