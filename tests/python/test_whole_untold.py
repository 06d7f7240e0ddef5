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
    def on_a_thread(work, count):
        told = []
        def rounds():
            for _ in range(count):
                try:
                    with ctxalloc.request(limit_bytes=200 * KiB, whole=True):
                        with Block():
                            work()
                except MemoryError as error:
                    told.append(error)
        thread = threading.Thread(target=rounds, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "its block never ended"
        assert len(entered) == len(left) == count, (len(entered), len(left))
        return told
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
    on_a_thread(work, 50)
    """
    )


@pytest.mark.parametrize("observes", ["settrace", "setprofile"])
def test_the_block_ends_where_a_tool_observes_its_last_function(observes: str):
    told = check(
        START
        + f"""
    def work():
        sys.{observes}(observe)
        try:
            bytearray(3 * MiB)
        finally:
            granted(b"a")
    told = on_a_thread(work, 5)
    assert all(type(error) is ctxalloc.BudgetExceeded for error in told)
    print(len(told))
    """
    )
    assert told == "5\n"


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
        entered.clear()
        left.clear()
        on_a_thread(names["work"], 1)
        kept[:] = [None] * 3000
    """
    )
