"""`whole=True` as a term of whatever gives requests accounts: it counts, or says at the start why it cannot."""

import importlib.util
import textwrap

import pytest
from whole_programs import check, needs_library, run

pytestmark = pytest.mark.any_numpy

SERVICE = """
text = json.dumps([{"a": n, "b": "x" * 50} for n in range(200_000)])
terms = lambda: ctxalloc.request(whole=True, limit_bytes=16 * MiB)
def environ(path):
    from wsgiref.util import setup_testing_defaults
    asked = {"PATH_INFO": path}
    setup_testing_defaults(asked)
    return asked
def answered(application, path):
    statuses = []
    body = application(environ(path), lambda status, headers, exc_info=None: statuses.append(status))
    b"".join(body)
    if hasattr(body, "close"):
        body.close()
    return statuses[-1][:3]
"""


def checked(head, program, **options):
    check(head + textwrap.dedent(program), **options)


needs = {name: importlib.util.find_spec(name) is None for name in ("fastapi", "django", "httpx")}


@needs_library
def test_a_service_of_wsgi_answers_413():
    checked(
        SERVICE,
        """
    from ctxalloc.wsgi import AllocatorMiddleware
    def application(environ, start_response):
        if environ["PATH_INFO"] == "/greedy":
            kept = json.loads(text)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"fine"]
    service = AllocatorMiddleware(application, routes={"/greedy": terms()}, default=terms())
    assert [answered(service, path) for path in ("/fine", "/greedy", "/fine")] == ["200", "413", "200"]
    """,
    )


@needs_library
@pytest.mark.skipif(needs["django"], reason="django")
def test_a_service_of_django_answers_413():
    checked(
        SERVICE,
        """
    import django, types
    from django.conf import settings
    from django.http import HttpResponse
    from django.urls import path
    def greedy(request):
        return HttpResponse(str(len(json.loads(text))))
    def fine(request):
        return HttpResponse("fine")
    urls = types.ModuleType("urls")
    urls.urlpatterns = [path("greedy", greedy), path("fine", fine)]
    sys = __import__("sys")
    sys.modules["urls"] = urls
    settings.configure(
        ALLOWED_HOSTS=["*"], ROOT_URLCONF="urls", SECRET_KEY="x",
        MIDDLEWARE=["ctxalloc.django.AllocatorMiddleware"], CTXALLOC={"default": terms()},
    )
    django.setup()
    from django.core.wsgi import get_wsgi_application
    service = get_wsgi_application()
    assert [answered(service, path) for path in ("/fine", "/greedy", "/fine")] == ["200", "413", "200"]
    """,
    )


@needs_library
@pytest.mark.skipif(needs["fastapi"] or needs["httpx"], reason="fastapi, httpx")
def test_an_account_of_fastapi_shows_the_whole():
    checked(
        SERVICE,
        """
    import fastapi, httpx
    from ctxalloc.asgi import AllocatorMiddleware
    from ctxalloc.fastapi import Account
    application = fastapi.FastAPI()
    async def shown(account: Account):
        kept = bytearray(3 * MiB)
        return account.stats.whole.object_bytes
    def greedy(account: Account):
        return len(json.loads(text))
    application.get("/shown")(shown)
    application.get("/greedy")(greedy)
    application.add_middleware(AllocatorMiddleware, default=terms())
    async def main():
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = [await client.get(path) for path in ("/shown", "/greedy", "/shown")]
        assert [one.status_code for one in answers] == [200, 413, 200]
        assert all(3 * MiB <= int(one.text) < 6 * MiB for one in answers[::2]), [one.text for one in answers]
    asyncio.run(main())
    """,
    )


@needs_library
def test_the_servers_reader_of_a_websocket_is_not_in_the_request():
    """The `receive` of uvicorn resumes reading; asyncio's reader has the Context of who did so."""
    checked(
        SERVICE,
        """
    from ctxalloc.asgi import AllocatorMiddleware
    seen, sent = [], []
    def reader(arrived):
        seen.append(ctxalloc.current_request())
        arrived.set_result({"type": "websocket.receive", "bytes": bytes(30 * MiB)})
    async def receive():
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.call_soon(reader, arrived)
        return await arrived
    async def send(message):
        sent.append(message["type"])
    async def application(scope, receive, send):
        await send({"type": "websocket.accept"})
        message = await receive()
        seen.append(ctxalloc.current_request())
        assert ctxalloc.current_request().stats.whole.object_bytes < MiB
        bytes(len(message["bytes"]))
    service = AllocatorMiddleware(application, default=terms())
    asyncio.run(service({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert seen[0] is None and seen[1] is not None, seen
    assert sent == ["websocket.accept", "websocket.close"], sent
    """,
    )


PYTEST = """
import subprocess, sys, tempfile
folder = tempfile.mkdtemp()
with open(f"{folder}/test_it.py", "w") as file:
    file.write('''
import pytest
@pytest.mark.ctxalloc(limit="16 MiB", whole=True)
def test_beyond():
    kept = bytearray(30 << 20)
@pytest.mark.ctxalloc(limit="16 MiB", whole=True)
def test_within(ctxalloc_request):
    kept = bytearray(5 << 20)
    assert ctxalloc_request.stats.whole.object_bytes >= 5 << 20
@pytest.mark.ctxalloc(limit="16 MiB")
def test_arrays_only(ctxalloc_request):
    kept = bytearray(30 << 20)
    assert ctxalloc_request.stats.whole is None
@pytest.mark.ctxalloc(whole=True, escaped=0)
def test_mistake():
    pass
@pytest.mark.ctxalloc(whole=1)
def test_no_bool():
    pass
''')
command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "ctxalloc_pytest", "-rA", "--tb=short"]
command += ["-c", "/dev/null", "--rootdir", folder, folder]
environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
done = subprocess.run(command, capture_output=True, text=True, env=environment)
found = dict(reversed(found) for found in re.findall(r"^(PASSED|FAILED|ERROR) .*?::(\\w+)", done.stdout, re.M))
"""


@needs_library
def test_a_test_with_the_mark_is_limited_in_all_its_memory():
    checked(
        PYTEST,
        """
    assert found == {"test_beyond": "FAILED", "test_within": "PASSED", "test_arrays_only": "PASSED",
                     "test_mistake": "FAILED", "test_no_bool": "FAILED"}, done.stdout
    for said in ("BudgetExceeded", "only arrays can be said to escape", "whole=1): give True or False"):
        assert said in done.stdout, done.stdout
    """,
    )


@needs_library
def test_a_test_with_the_mark_fails_where_it_cannot_be_had():
    checked(
        PYTEST,
        """
    assert found["test_arrays_only"] == "PASSED", done.stdout
    assert (found["test_within"], found["test_beyond"]) == ("ERROR", "FAILED"), done.stdout
    assert "ctxalloc(whole=True): request(whole=True) cannot be had" in done.stdout, done.stdout
    """,
        preload=False,
        LD_PRELOAD="",
    )


@needs_library
def test_a_process_initializer_counts_the_whole_of_its_process():
    check("""
        import multiprocessing
        from ctxalloc import process_initializer
        begin = process_initializer(whole=True, limit_bytes=64 * MiB)
        with multiprocessing.get_context("spawn").Pool(1, begin) as pool:
            assert pool.apply(bytes, (MiB,)) == bytes(MiB)
            for _ in range(2):
                try:
                    pool.apply(eval, ("len([str(n) * 100 for n in range(1_000_000)])",))
                except MemoryError:
                    pass
                else:
                    raise AssertionError("not refused")
            assert pool.apply(len, ([1, 2],)) == 2
    """)


@needs_library
def test_middlewares_and_initializers_say_at_the_start_what_is_missing():
    ended = run(
        """
        from ctxalloc import process_initializer, _processes
        begin = process_initializer(whole=True)  # in the parent, which needs no library
        for start in (lambda: ctxalloc.request(whole=True), begin):
            try:
                start()
            except RuntimeError as error:
                assert "LD_PRELOAD=" in str(error), error
            else:
                raise AssertionError("no error")
        for wrong in ({"whole": 1}, {"whole": True, "handler": "pool"}):
            try:
                process_initializer(**wrong)
            except (TypeError, ValueError) as error:
                print(error)
            else:
                raise AssertionError("no error")
        """,
        preload=False,
        LD_PRELOAD="",
    )
    assert ended.returncode == 0, ended.stderr
    assert "whole=1: give True or False" in ended.stdout
