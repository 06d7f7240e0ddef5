"""A response of Flask's test client, which closes none: its request ends with the last reference to it."""

import pytest
from subprocesses import says

pytestmark = [pytest.mark.any_numpy, pytest.mark.once]
APPLICATION = """
import gc
import ctxalloc, flask, numpy as np
from ctxalloc.wsgi import AllocatorMiddleware
gc.disable()
application, told = flask.Flask("told"), []

@application.get("/plain")
def plain(): x = np.ones(1000); return "answer"

@application.get("/stream")
def stream(): return iter(["a", "b"])

@application.get("/aborted")
def aborted(): x = np.ones(1000); flask.abort(404)

application.wsgi_app = AllocatorMiddleware(
    application.wsgi_app, on_end=lambda _, report: told.append((report.outcome, report.status, report.escaped.count)))

def seen():
    found, told[:] = told[:], []
    return found
"""


def test_a_response_that_is_never_closed_ends_when_it_is_dropped() -> None:
    assert (
        says(
            APPLICATION
            + """
client = application.test_client()
for url in ("/plain", "/stream", "/aborted"):
    response = client.get(url)
    response.get_data()
    print(seen(), end=" ")
    response = None
    print(seen())
client.get("/plain")
print(seen())
with client.get("/stream") as response:
    response.get_data()
print(seen())
"""
        )
        == "[] [('completed', 200, 0)]\n[] [('completed', 200, 0)]\n[] [('completed', 404, 0)]\n"
        "[('unfinished', 200, 0)]\n[('completed', 200, 0)]"
    )


REFUSED = """
from ctxalloc import problems
tenant = ctxalloc.Budget(name="tenant")

@application.get("/refused")
def refused(): held = np.ones(1000); np.ones(1_000_000)

application.wsgi_app = AllocatorMiddleware(
    application.wsgi_app.app, default=ctxalloc.request(limit_bytes=1_000_000), tenant=lambda _: tenant,
    on_end=lambda _, report: told.append((report.outcome, report.status, report.escaped.count)))
"""
ANSWERS = """
@application.errorhandler(MemoryError)
def answers(error):
    problem = problems.problem(error)
    return problem.body, problem.status, problem.headers
"""


@pytest.mark.parametrize("handler", ["", ANSWERS])
def test_a_refused_response_ends_when_it_is_dropped(handler: str) -> None:
    """The refusal is kept for the report; its frames lead to the client's, which has the response."""
    assert (
        says(
            APPLICATION
            + REFUSED
            + handler
            + """
for reads in (True, False):
    response = application.test_client().get("/refused")
    assert response.status_code == 413
    if reads:
        response.get_data()
    print(seen(), tenant.is_idle, end=" ")
    response = None
    print(seen(), tenant.is_idle)
with application.test_client().get("/refused"):
    pass
print(seen(), tenant.is_idle)
"""
        )
        == "[] False [('refused', 413, 0)] True\n[] False [('refused', 413, 0)] True\n[('refused', 413, 0)] True"
    )


def test_an_answer_of_500_is_failed_whether_or_not_it_is_read() -> None:
    program = """
application.logger.disabled = True
@application.get("/failed")
def failed(): raise ValueError

for reads in (True, False):
    with application.test_client().get("/failed") as response:
        if reads:
            response.get_data()
    print(seen())
"""
    assert says(APPLICATION + program) == "[('failed', 500, 0)]\n[('failed', 500, 0)]"


def test_a_body_that_survived_a_refusal_ends_when_it_is_dropped() -> None:
    assert (
        says(
            APPLICATION
            + REFUSED
            + """
class Parts:
    def __init__(self): self.left = [b"a", b"b"]
    def __iter__(self): return self
    def __next__(self):
        try:
            np.ones(1_000_000)
        except MemoryError as error:
            assert problems.refusal(error) is not None
        if not self.left:
            raise StopIteration
        return self.left.pop()

application.wsgi_app.app = lambda environ, start_response: start_response("200 OK", []) and Parts()
for parts in (1, 2, 3):
    body = application.wsgi_app({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, lambda *_: None)
    for _ in range(parts):
        next(body, None)
    assert not told
    body = None
    print(seen(), tenant.is_idle)
"""
        )
        == "[('unfinished', 200, 0)] True\n[('unfinished', 200, 0)] True\n[('completed', 200, 0)] True"
    )


def test_what_a_view_had_when_it_aborted_has_not_escaped() -> None:
    """Flask keeps the exception in a cycle with its own frame. A handler of the application's still gets it."""
    assert (
        says(
            APPLICATION
            + """
@application.errorhandler(403)
def handled(error): return f"{error.code} handled", 403

@application.get("/forbidden")
def forbidden(): x = np.ones(1000); flask.abort(403)

@application.get("/missing")
def missing(): x = np.ones(1000); return flask.request.args["key"]

application.wsgi_app = AllocatorMiddleware(application.wsgi_app)
for url in ("/aborted", "/missing", "/forbidden"):
    with application.test_client().get(url) as response:
        print(response.get_data()[:11], end=" ")
    print(seen())
"""
        )
        == "b'<!doctype h' [('completed', 404, 0)]\nb'<!doctype h' [('completed', 400, 0)]\n"
        "b'403 handled' [('completed', 403, 0)]"
    )


def test_one_that_a_program_keeps_ends_at_its_exit() -> None:
    assert (
        says(
            APPLICATION
            + """
import atexit
ended = AllocatorMiddleware(
    application.wsgi_app.app, on_end=lambda _, report: print(report.status, report.outcome))
application.wsgi_app = ended
kept = application.test_client().get("/plain")
"""
        )
        == "200 cancelled"
    )
