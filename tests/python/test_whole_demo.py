"""`examples/tenants/whole.py`, what `make demo-whole` shows: who is refused, who is served, what is known of both."""

from pathlib import Path

import pytest
from whole_programs import check, needs_library

for library in ("httpx", "matplotlib", "PIL", "starlette", "uvicorn"):
    pytest.importorskip(library)

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.once, needs_library]


def test_the_greedy_tenant_is_refused_memory_that_is_no_array():
    check(
        """
        sys.path[:0] = sys.argv[1:]
        from asgi_calls import call, http
        from examples.tenants import serving, whole_app as app
        service = app.build(is_whole=True)
        def ask(tenant, path):
            return asyncio.run(call(service, http(path, "POST", headers=[(b"tenant", tenant)]))).status
        assert ask(b"greedy", "/parse/small") == 200
        with ctxalloc.request(whole=True, budget=serving.TENANTS["greedy"]):
            held = bytearray(150 * MiB)
        assert ask(b"greedy", "/parse/large") == 503
        assert ask(b"greedy", "/read/large") == 503
        assert ask(b"greedy", "/decode/large") == 503
        for path in "/parse/small", "/read/small", "/decode/small":
            assert ask(b"patient", path) == 200
        del held
        assert ask(b"greedy", "/parse/large") == 200
        arrays, native, objects = max(app.peaks["/parse/{size}"], key=sum)
        assert arrays == 0 and objects > 10 * MiB, (arrays, native, objects)
        assert ask(b"greedy", "/decode/large") == 200
        arrays, native, objects = max(app.peaks["/decode/{size}"], key=sum)
        assert native > 20 * MiB, (arrays, native, objects)
        assert serving.SERVICE.in_use_bytes < 2 * MiB, serving.SERVICE
        """,
        str(ROOT),
        str(Path(__file__).parent),
    )
