"""Recordings of whole requests: native memory and objects beside arrays, and their replays."""

import json
from pathlib import Path

import commands
import pytest
from whole_programs import check, needs_library

from ctxalloc._native import _Recording

pytestmark = pytest.mark.any_numpy


@needs_library
@pytest.mark.once
def test_what_a_whole_request_counts_is_recorded_with_its_arrays(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    program = f"""
    with ctxalloc.record({str(path)!r}, one_in=1, share=1.0):
        for turn in range(5):
            with ctxalloc.request(name=f"whole {{turn}}", whole=True, root=True) as outer:
                data = json.loads(json.dumps([{{"a": n, "b": "x" * (n % 100)}} for n in range(3000)]))
                array, large = numpy.ones(100_000), bytes(1_000_000)
                with ctxalloc.request(name="inner"):
                    inner, more = numpy.ones(10_000), [bytes(2000) for _ in range(200)]
            print(outer.stats.peak_bytes)
        del data, array, large, inner, more
    """
    peaks = [int(line) for line in check(program).split()]
    recording = _Recording(path)
    live: dict[int, int] = {}
    names, parents = {}, {}
    found: list[int] = []
    current: dict[int, int] = {}
    peak: dict[int, int] = {}
    total: dict[int, int] = {}
    for _at, _thread, request, kind, numbers in recording.events(0, 1 << 30):
        if kind == "begin":
            names[request], parents[request] = recording.names[numbers[0]], numbers[2]
            current[request] = peak[request] = total[request] = 0
        elif kind in ("allocate", "resize", "free"):
            before = live.pop(numbers[0], 0)
            after = 0 if kind == "free" else numbers[1]
            if after:
                live[numbers[0]] = after
            around = request
            while around:
                current[around] += after - before
                total[around] += max(after - before, 0)
                peak[around] = max(peak[around], current[around])
                around = parents[around]
        elif kind == "end":
            sums = [peak[request], total[request], current[request]]
            assert sums == [numbers[0], numbers[1], numbers[3]], names[request]
            found += [peak[request]] if names[request] != "inner" else []
    assert found == peaks


WHOLE_WORK = """
    import array, io, sqlite3, threading
    from PIL import Image
    picture = io.BytesIO()
    Image.effect_noise((700, 500), 40).save(picture, "PNG")
    text = json.dumps([{"a": n, "b": "x" * (n % 100)} for n in range(2000)])
    kept = []
    def work(turn):
        rng = random.Random(turn)
        rows = json.loads(text)
        image = Image.open(io.BytesIO(picture.getvalue())).convert("RGB").resize((900, 600))
        grown, numbers, joined = [], array.array("d"), bytearray()
        for n in range(rng.randrange(3000, 9000)):
            grown.append(n)
            numbers.append(n)
            joined += b"0123456789" * 10
        del grown[100:], numbers[50:], joined[3000:]
        block = libc.malloc(5000)
        for size in (rng.randrange(3, 1 << 20) for _ in range(40)):
            block = libc.realloc(block, size)
        with ctxalloc.request(name="inner", whole=turn % 3 > 0):
            array_ = numpy.asarray(image).astype("f8")
            table = sqlite3.connect(":memory:")
            table.execute("create table t (a)")
            table.executemany("insert into t values (?)", ((row["b"],) for row in rows))
            kept.append((array_[: 10 * turn].copy(), table))
        kept.append((rows[:100], joined, numbers, turn % 2 and image))
        elsewhere = threading.Thread(target=lambda: libc.free(block))
        elsewhere.start()
        elsewhere.join()
"""


def command(*words: str | Path) -> str:
    """What a command prints of one replay; it must end well."""
    done = commands.ctxalloc(*words, "--rounds", "1", "--strategy", "default", "--json")
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_library
@pytest.mark.parametrize("by", ["api", "environment"])
def test_a_whole_request_is_replayed_with_the_sums_it_had(by: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorded = f"with ctxalloc.record({str(path)!r}, one_in=1, share=1.0):" if by == "api" else "if True:"
    environment = {"CTXALLOC_RECORD": str(path), "CTXALLOC_RECORD_ONE_IN": "1"} if by == "environment" else {}
    program = f"""{WHOLE_WORK}
    {recorded}
        for turn in range(6):
            with ctxalloc.request(name=f"whole {{turn}}", whole=True, root=True) as one:
                work(turn)
            print(one.stats.peak_bytes)
            if turn == 3:  # what escaped is freed after its request's end, and resized there
                kept[1][0].extend(range(100_000))
                del kept[:3]
        kept.clear()
    """
    peaks = [int(line) for line in check(program, **environment).split()]
    assert len(peaks) == 6
    recording = _Recording(path)
    whole = {at for at, name in enumerate(recording.names) if name.startswith("whole")}
    names: dict[int, int] = {}
    found, resizes = [], 0
    charged: set[int] = set()
    for _at, _thread, request, kind, numbers in recording.events(0, 1 << 30):
        if kind == "begin":
            names[request] = numbers[0]
        elif kind == "allocate" and numbers[2] == 0:
            charged.add(numbers[0])
        elif kind == "resize" and numbers[0] in charged:
            resizes += 1
        elif kind == "end" and names[request] in whole:
            found.append(numbers[0])
    if by == "environment":  # which keeps to its share of the time: on a busy machine not all six are recorded
        assert found
        assert set(found) <= set(peaks)
        peaks = [peak for peak in peaks if peak in found]
    assert found == peaks
    assert resizes > (100 if len(found) == 6 else 10)
    for options in ((), ("--one-thread",)):
        facts = json.loads(command("replay", path, *options))
        assert (facts["requests"], facts["compared"]) == (len(found), 2 * len(found))
        assert (facts["left_out"], facts["unordered_peaks"], facts["torn"]) == (0, 0, 0)
    # What it did beside arrays is not made, so no strategy's business.
    told_of = json.loads(command("recommend", path))["routes"]
    assert sorted(max(route["peak_bytes"].values()) for route in told_of) == sorted(peaks)
