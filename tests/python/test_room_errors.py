"""``NoRoom`` is copied, pickled and crosses processes with all that it says, but for the number of its budget."""

import concurrent.futures
import copy
import multiprocessing
import pickle

import pytest

import ctxalloc

pytestmark = pytest.mark.any_numpy


def no_room(kind: str) -> ctxalloc.NoRoom:
    """One error of each kind, of budgets that this process has."""
    root = ctxalloc.Budget(1000, name="root")
    promised = ctxalloc.Budget(parent=root, guarantee_bytes=400, name="promised")
    tenant = ctxalloc.Budget(900, parent=root, name="tenant")
    size, timeout = {"never fits": (700, None), "timed out": (550, 0), "queue is full": (550, None)}[kind]
    tenant.max_waiting = 0 if kind == "queue is full" else 10
    with (
        ctxalloc.request(budget=tenant, reserve_bytes=300, root=True),
        pytest.raises(ctxalloc.NoRoom) as raised,
        ctxalloc.request(budget=tenant, reserve_bytes=size, timeout=timeout, root=True, name="r"),
    ):
        pytest.fail("there is no room")
    assert (raised.value.reason, promised.guarantee_bytes) == (kind, 400)
    return raised.value


def raise_no_room(kind: str) -> None:
    raise no_room(kind)


def said(error: BaseException) -> dict[str, object]:
    """All that it says, wherever it is."""
    own = [name for name in dir(error) if not name.startswith("_") and name not in {"add_note", "with_traceback"}]
    return {"text": str(error), "repr": repr(error), "type": type(error)} | {
        name: getattr(error, name) for name in own if name != "budget_id"
    }


KINDS = ("never fits", "timed out", "queue is full")


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_says_the_same(kind):
    error = no_room(kind)
    error.add_note("of the caller")
    error.more = 5
    ways = [copy.copy, copy.deepcopy, *(lambda it, way=way: pickle.loads(pickle.dumps(it, way)) for way in range(6))]
    for way in ways:
        again = way(error)
        assert said(again) == said(error)
        assert (again.more, again.__notes__, again.budget_id) == (5, ["of the caller"], None)
    assert error.budget_id is not None
    assert error.guaranteed_bytes == (0 if kind == "queue is full" else 400), "of the budget that it names"


@pytest.mark.once
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_it_crosses_processes(method):
    context = multiprocessing.get_context(method)
    here = {kind: said(no_room(kind)) for kind in KINDS}
    with context.Pool(1) as pool, concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        for kind in KINDS:
            for ask in (
                lambda: pool.apply(raise_no_room, (kind,)),  # noqa: B023 - called at once
                lambda: executor.submit(raise_no_room, kind).result(60),  # noqa: B023 - as above
            ):
                with pytest.raises(ctxalloc.NoRoom) as raised:
                    ask()
                assert said(raised.value) == here[kind]
                assert raised.value.budget_id is None
            assert said(executor.submit(no_room, kind).result(60)) == here[kind]
