"""What a limit of `request(whole=True)` does to libraries and services: who survives a refusal gets it."""

import importlib.util
import textwrap

import pytest
from whole_programs import check, needs_library

pytestmark = pytest.mark.any_numpy


GREEDY = {
    "bytes": "work = lambda: bytes(60 * MiB)",
    "str": "work = lambda: 'x' * (60 * MiB)",
    "list": "work = lambda: [str(n) * 200 for n in range(100_000)]",
    "dict": "work = lambda: {n: n for n in range(1_000_000)}",
    "numpy": "work = lambda: numpy.ones(8 * MiB)",
    "json": "text = json.dumps([{'a': n, 'b': 'x' * 50} for n in range(200_000)]); work = lambda: json.loads(text)",
    "pickle": "text = pickle.dumps([str(n) * 20 for n in range(300_000)]); work = lambda: pickle.loads(text)",
    "re": "text = 'ab ' * 2_000_000; work = lambda: re.findall('[a-z]+', text)",
    "zlib": "text = zlib.compress(bytes(60 * MiB)); work = lambda: zlib.decompress(text)",
    "sqlite3": """
        base = sqlite3.connect(":memory:")
        base.execute("create table t(a)")
        rows = [("x" * 10_000,)] * 5000  # what grows is SQLite's
        work = lambda: base.executemany("insert into t values(?)", rows)
    """,
    "PIL": "from PIL import Image; work = lambda: Image.new('RGB', (6000, 4000))",
    "lxml": """
        from lxml import etree
        text = b"<a>" + b"<b c='1'>text</b>" * 300_000 + b"</a>"
        work = lambda: etree.fromstring(text)
    """,
}


@pytest.mark.long
@needs_library
@pytest.mark.parametrize("name", GREEDY)
def test_a_library_that_survives_is_held_to_the_limit(name):
    if importlib.util.find_spec(name if name in {"PIL", "lxml"} else "json") is None:
        pytest.skip(f"{name} is not installed here")
    check(
        textwrap.dedent(GREEDY[name])
        + textwrap.dedent(f"""
        name, request, kept = {name!r}, ctxalloc.request(whole=True, limit_bytes=12 * MiB), None
        try:
            with request:
                kept = work()
        except Exception as error:
            assert isinstance(error, ctxalloc.BudgetExceeded), repr(error)
        else:
            raise AssertionError(request.stats)
        assert request.stats.peak_bytes <= 13 * MiB, request.stats
        # One small object, where Python itself asks for them: so does a module that Python was built with (Debian's).
        is_python = name in {{'list', 'dict', 're'}} or f'_{{name}}' in sys.builtin_module_names
        assert request.stats.whole.granted <= is_python, request.stats
        base = kept = None
        gc.collect()
        assert request.stats.live_bytes < 300 * KiB, request.stats
        with ctxalloc.request(whole=True, limit_bytes=12 * MiB):
            next_one = [str(n) for n in range(10_000)], bytearray(MiB)
        """)
    )


@needs_library
@pytest.mark.parametrize("name", ["orjson", "pydantic"])
def test_a_library_that_would_die_gets_its_block_and_the_request_ends(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed here")
    work = {
        "orjson": "import orjson; text = orjson.dumps(['x' * 50] * 500_000); work = lambda: orjson.loads(text)",
        "pydantic": """
            import pydantic
            reader = pydantic.TypeAdapter(list[str])
            text = reader.dump_json(['x' * 50] * 500_000)
            work = lambda: reader.validate_json(text)
        """,
    }[name]
    check(
        textwrap.dedent(work)
        + textwrap.dedent("""
        try:
            with ctxalloc.request(whole=True, limit_bytes=4 * MiB) as request:
                kept = work()
        except ctxalloc.BudgetExceeded:
            assert request.stats.whole.granted > 0
        else:
            raise AssertionError(request.stats)
        kept = None
        gc.collect()
        assert request.stats.live_bytes < 600 * KiB
        with ctxalloc.request(whole=True, limit_bytes=4 * MiB):
            bytearray(MiB)
        """)
    )


@needs_library
def test_a_parser_of_xml_is_made_whatever_the_limit():
    """CPython uses it before it looks whether there is one."""
    granted = check("""
        from xml.parsers.expat import ParserCreate
        granted = 0
        for step in range(300):
            try:
                with ctxalloc.request(whole=True, limit_bytes=1 + step * 100) as request:
                    held = []
                    try:
                        while True:
                            held.append(bytearray(1500))
                    except MemoryError:
                        pass
                    parser = ParserCreate(namespace_separator=" " if step % 2 else None)
                    parser.Parse("<a b='c'>text</a>", True)
            except ctxalloc.BudgetExceeded:
                pass
            granted += request.stats.whole.granted
        print(granted)
    """)
    assert int(granted) > 100


@needs_library
@pytest.mark.parametrize("kind", ["etree", "minidom", "sax"])
def test_what_is_read_of_xml_is_held_to_the_limit(kind):
    work = {
        "etree": "import xml.etree.ElementTree as tree; work = lambda: tree.fromstring(text)",
        "minidom": "import xml.dom.minidom as dom; work = lambda: dom.parseString(text)",
        "sax": """
            import xml.sax
            class Keeps(xml.sax.ContentHandler):
                def startDocument(self):
                    self.kept = []
                def characters(self, content):
                    self.kept.append(content * 100)
            work = lambda: xml.sax.parseString(text, Keeps())
        """,
    }[kind]
    check(
        textwrap.dedent(work)
        + textwrap.dedent("""
        text = "<a>" + "<b c='1'>some text</b>" * 50_000 + "</a>"
        request = ctxalloc.request(whole=True, limit_bytes=6 * MiB)
        try:
            with request:
                kept = work()
        except Exception as error:
            assert isinstance(error, ctxalloc.BudgetExceeded) or type(error).__name__ == "ParseError", repr(error)
        else:
            raise AssertionError(request.stats)
        assert request.stats.peak_bytes <= 7 * MiB, request.stats
        """)
    )


@needs_library
def test_a_program_that_handles_refusals_goes_on_below_its_limit():
    check("""
        refused = 0
        with ctxalloc.request(whole=True, limit_bytes=16 * MiB) as request:
            held = []
            for _ in range(500):
                try:
                    held.append(bytearray(1_000_000))  # of 16: what is left has room for samples too
                except MemoryError as error:
                    refused += 1
                    text = "handled: " + repr(error) * 10
                    held.pop()
        assert refused > 100 and request.stats.peak_bytes <= 17 * MiB
    """)


@needs_library
def test_cpythons_own_loop_gets_its_small_objects():
    """It ended the process where a function's block was NULL (CPython 3.13)."""
    check(
        """
    def makes(held, number):
        def inside(value=number, *, other=number): return held, value
        async def later(): return inside
        class Made:
            def __init__(self): self.value = inside
        held += [inside, lambda: number, Made(), (n for n in held), Made().__init__, {"a": number}, f"{number} of"]
        later().close()
    def blocks(number):
        held = []
        with ctxalloc.request(whole=True, limit_bytes=MiB + number, root=True):
            while True:
                makes(held, number)
    async def tasks(number):
        held = []
        async with ctxalloc.request(whole=True, limit_bytes=MiB + number, root=True):
            while True:
                makes(held, number)
                await asyncio.sleep(0)
    for number in range(40):
        for work in blocks, lambda number: asyncio.run(tasks(number)):
            try:
                work(number)
            except MemoryError as error:
                assert type(error) is ctxalloc.BudgetExceeded, repr(error)
    """
    )


def test_a_context_that_is_carried_on_by_setting_its_variables_is_limited():
    """As asgiref's `async_to_sync` does it: no Context is entered, so none has another version."""
    check("""
        from contextlib import suppress

        def carried_on(context):
            for variable in context:
                variable.set(context[variable])
            return len([bytes(MiB) for _ in range(40)])

        for _ in range(20):
            refused = []
            with suppress(ctxalloc.BudgetExceeded), ctxalloc.request(whole=True, limit_bytes=8 * MiB):
                context = contextvars.copy_context()

                def work():
                    try:
                        carried_on(context)
                    except MemoryError as error:
                        refused.append(error)

                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            assert refused, "it was not counted"
    """)


def test_such_a_context_is_counted_without_the_gil_too():
    check("""
        seen = []
        for _ in range(20):
            with ctxalloc.request(whole=True) as request:
                context = contextvars.copy_context()

                def work():
                    for variable in context:
                        variable.set(context[variable])
                    block = without_gil.malloc(5 * MiB)
                    seen.append(request.stats.whole.native_bytes >= 5 * MiB)
                    without_gil.free(block)

                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
        assert seen == [True] * 20, seen
    """)


@needs_library
@pytest.mark.parametrize(
    "what", ["bytearray(30 * MiB)", "[None] * (30 * MiB // 8)", "[n for n in range(MiB)]", "grown()"]
)
def test_a_refused_block_of_any_kind_has_reclaimers_asked(what):
    """As a refused array does: they help the next allocation."""
    check(f"""
        def grown():
            block = bytearray(MiB)
            block.extend(bytes(29 * MiB))
            return block

        budget, cache, asked = ctxalloc.Budget(100 * MiB, name="tenant"), [], []
        was_refused, is_clear = threading.Event(), threading.Event()
        with ctxalloc.request(whole=True, budget=budget, root=True):
            cache.extend(bytearray(MiB) for _ in range(90))

        def reclaim(missing_bytes):
            asked.append(missing_bytes)
            was_refused.wait(60)  # room that came meanwhile would serve the rest of the small ones
            cache.clear()
            is_clear.set()

        def attempt():
            with ctxalloc.request(whole=True, budget=budget, root=True):
                {what}

        reclaimer = budget.add_reclaimer(reclaim)
        try:
            attempt()
        except ctxalloc.BudgetExceeded:
            was_refused.set()
            assert is_clear.wait(60), "nobody was asked"
        else:
            raise AssertionError("it was not refused")
        attempt()
        assert 0 < asked[0] <= 40 * MiB, asked
    """)


@pytest.mark.parametrize(
    "work", ["kept.setdefault(name, name)", "kept.update(json.loads(text))"], ids=["setdefault", "json"]
)
def test_a_dict_that_has_no_memory_for_its_table_survives(work):
    """CPython 3.13 counted the item nevertheless, and let go of what it had not got: the process died of it soon."""
    check(
        """
        work, refused = compile(f"for name in names: {sys.argv[1]}", "own.py", "exec"), 0
        for number in range(80):
            names, kept = [f"name {number} {n}" for n in range(40_000)], {}
            text = json.dumps(dict.fromkeys(names[::20], 0))
            try:
                with ctxalloc.request(whole=True, limit_bytes=4000 + 997 * number):
                    exec(work)
            except MemoryError:
                refused += 1
            assert len(kept) == len(list(kept.items())), "its count is not that of its items"
        gc.collect()
        assert refused == 80, refused
        """,
        work,
    )
