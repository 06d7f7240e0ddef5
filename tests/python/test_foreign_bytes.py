"""Random bytes for the C functions: `foreign_bytes.py` says which, in a process of its own."""

from pathlib import Path

import subprocesses


def test_whatever_c_hands_over_is_an_answer_or_an_error_and_no_crash() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import foreign_bytes; foreign_bytes.main()"
    )
    assert subprocesses.says(program) == "no crash"
