"""A request's handler is nobody else's: not by name, not in a list, not by what was kept of it."""

import copy
import pickle
import threading

import numpy as np
import numpy_c
import pytest

import ctxalloc


def test_nobody_selects_it_by_name() -> None:
    with ctxalloc.request() as scope:
        name = scope.handler.name
        with pytest.raises(ctxalloc.UnknownHandlerError) as raised:
            ctxalloc.use(name)
        assert name not in str(raised.value).partition("registered are")[2]
        for ask in (ctxalloc.handler, ctxalloc.set_handler):
            with pytest.raises(ctxalloc.UnknownHandlerError):
                ask(name)
        assert name not in [handler.name for handler in ctxalloc.handlers()]
    with ctxalloc.request(name="pool") as named:
        assert named.handler.name == "pool" == ctxalloc.get_handler_name()
        assert ctxalloc.handler("pool") != named.handler


def test_it_copies_but_does_not_pickle() -> None:
    with ctxalloc.request() as scope:
        assert copy.copy(scope.handler) == copy.deepcopy([scope.handler])[0] == scope.handler
        with pytest.raises(TypeError, match="belongs to a request of this process"):
            pickle.dumps(scope.handler)
    pool = ctxalloc.handler("pool")
    assert copy.copy(pool) is copy.deepcopy(pool) is pickle.loads(pickle.dumps(pool)) is pool


def test_what_was_kept_of_it_never_selects_the_next_requests() -> None:
    with ctxalloc.request() as scope:
        kept = ctxalloc.use(scope.handler)
    with ctxalloc.request() as other:
        assert other.handler != kept.handler
        with kept:
            array = np.zeros(100)
            assert ctxalloc.handler_of(array) == ctxalloc.current() == kept.handler
        assert other.stats.count == 0
    assert scope.stats.count == 1, "it is over, and what comes late is charged to it all the same"


def test_numpys_own_functions_select_it_as_any_other() -> None:
    with ctxalloc.request() as scope:
        old = numpy_c.set_handler(ctxalloc.handler("pool").capsule)
        assert ctxalloc.current().name == "pool"
        numpy_c.set_handler(old)
        assert ctxalloc.current() == scope.handler
        array = np.zeros(10)
        assert ctxalloc.get_handler_name(array) == ctxalloc.get_handler_name() == scope.handler.name


def test_an_escape_is_resized_and_freed_by_its_own_on_another_thread() -> None:
    with ctxalloc.request() as scope:
        escape = np.full(1000, 7)
    with ctxalloc.request() as other:
        np.full(1000, 8)
        thread = threading.Thread(target=escape.resize, args=(3000,), kwargs={"refcheck": False})
        thread.start()
        thread.join()
        assert other.stats.live_bytes == 0
    assert (escape[:1000] == 7).all()
    assert (escape[1000:] == 0).all()
    assert scope.stats.live_bytes == 24_000
    box = [escape]
    del escape
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert scope.stats.live_bytes == 0
