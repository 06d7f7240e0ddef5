"""On threads too, what tells a request of its limit comes where its handlers are, and its block ends.

Before CPython 3.12 an exception was set asynchronously for other threads than the main one. Where the call failed in
which the block was granted, it was raised in the first instruction of `__exit__`; where it was taken back, the next
traced function began without end.
"""

import pytest
from whole_programs import check, needs_library

pytestmark = [pytest.mark.any_numpy, needs_library]

START = """
    import functools, hashlib
    entered, left = [], []
    class Block:
        def __enter__(self):
            entered.append(True)
        def __exit__(self, *error):
            left.append(True)
    granted = functools.partial(hashlib.scrypt, salt=b"b", n=512, r=8, p=1)  # 512 KiB of OpenSSL's
    def observe(frame, event, argument):
        return observe
    def told(work, count, where="thread"):
        entered.clear()
        left.clear()
        errors = []
        def rounds():
            for _ in range(count):
                try:
                    with ctxalloc.request(limit_bytes=200 * KiB, whole=True):
                        with Block():
                            work()
                except MemoryError as error:
                    errors.append(error)
        if where == "main":
            rounds()
        else:
            thread = threading.Thread(target=rounds, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "its block never ended"
        assert len(entered) == len(left) == count, (len(entered), len(left))
        return errors
"""


def test_a_call_that_fails_after_it_was_granted_a_block():
    check(
        START
        + """
    def work():
        try:
            list(map(granted, [b"a", None]))
        except TypeError:
            pass
    told(work, 50)
    """
    )


@pytest.mark.parametrize("observes", ["settrace", "setprofile"])
def test_the_block_ends_where_a_tool_observes_its_last_function(observes: str):
    check(
        START
        + f"""
    def work():
        sys.{observes}(observe)
        try:
            bytearray(3 * MiB)
        finally:
            granted(b"a")
    errors = told(work, 5)
    assert [type(error) for error in errors] == [ctxalloc.BudgetExceeded] * 5, errors
    """
    )


def test_what_a_tool_takes_for_the_lines_of_a_long_function():
    """More than 1 KiB, once: it was refused, and what tells of it came in `__exit__` too."""
    check(
        START
        + """
    kept = [None] * 3000
    def fill():
        try:
            for number in range(3000):
                kept[number] = [None] * 60
        except MemoryError:
            pass
        sys.settrace(observe)
    for _ in range(30):
        names = {"fill": fill}
        exec("def work():\\n    fill()\\n" + "    x = [1, 2, 3]\\n" * 400, names)
        told(names["work"], 1)
        kept[:] = [None] * 3000
    """
    )


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("work", ["int('x')", "open(os.devnull).close()", "open(os.devnull, 'rb', 0).close()"])
def test_an_error_that_a_call_drops_tells_nobody(work: str, where: str) -> None:
    """`open` first tries whether its path is a number: where that was refused it went on, and the request was not."""
    check(
        START
        + f"""
    def once():
        granted(b"a")
        try:
            {work}
        except ValueError:
            pass
        rows = [[1] * 60 for _ in range(100)]
    errors = told(once, 40, sys.argv[1])
    assert len(errors) == 40, len(errors)
    """,
        where,
    )


@pytest.mark.parametrize("where", ["main", "thread"])
def test_what_fork_calls_is_called(where: str) -> None:
    """It prints what these functions raise, and calls none of them where it has no memory for a list of them."""
    check(
        START
        + """
    called, lost = [], []
    sys.unraisablehook = lambda one: lost.append(one)
    os.register_at_fork(
        before=lambda: called.append([1]),
        after_in_parent=lambda: called.append([2]),
        after_in_child=lambda: called.append([3]),
    )
    def work():
        granted(b"a")
        if (child := os.fork()) == 0:
            while True:
                try:
                    os._exit(called != [[1], [3]] or bool(lost))
                except MemoryError:
                    pass  # the child's request is told too
        _, ended = os.waitpid(child, 0)
        assert ended == 0, ended
    for _ in range(15):
        called.clear()
        told(work, 1, sys.argv[1])
        # From 3.12 on it may be told before.
        assert called in ([], [[1], [2]]) and not lost, (called, lost)
    """,
        where,
    )
