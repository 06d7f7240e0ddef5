"""What CPython does not survive is not refused: functions that let go twice, or of what they have not made yet.

`scripts/refuse_each_block.py` found them in plain CPython.
"""

import pytest
from whole_programs import check, needs_library

pytestmark = needs_library

WORKS = {
    "items": "iter(items)",
    "items of a list": "list(items)",
    "items in C": "next(map(iter, [items]))",
    "items reversed": "reversed(items)",
    "items of an OrderedDict": "iter(ordered)",
    "the same reversed": "reversed(ordered)",
    "elements": "element.iter()",
    "texts": "element.itertext()",
    "functions": "lambda: number",
    "generators": "(n for n in items)",
    "variables": "locals().copy()",
    "code": "compile('def f(a):\\n  return [a, lambda: 0]', 'own.py', 'exec')",
    "evaluated": "eval('lambda: 0', {})",
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_what_python_does_not_survive_is_not_refused(work: str) -> None:
    """Each of these ended the process in one of a few rounds, on some of CPython 3.11 to 3.14."""
    check(
        """
    import collections
    import xml.etree.ElementTree as ET
    items, element = {str(number): number for number in range(3)}.items(), ET.fromstring("<a>b<c/></a>")
    ordered = collections.OrderedDict(items).items()
    def fill(kept):
        try:
            kept.extend(map(str, range(10**7)))
        except MemoryError:
            pass
    def round(made):
        number = 0
        while number < len(made):
            made[number] = {work}
            number += 1
    def rounds():
        global refused
        for _ in range(6):
            kept, made = [], [None] * 8000
            try:
                with ctxalloc.request(whole=True, limit_bytes=1 * MiB):
                    fill(kept)
                    for _ in range(4):
                        try:
                            round(made)
                        except MemoryError:
                            refused += 1
            except MemoryError:
                refused += 1
    refused = 0
    thread = threading.Thread(target=rounds)
    thread.start()
    thread.join()
    gc.collect()
    assert refused >= 6, refused
    """.replace("{work}", work)
    )
