"""The man page of the command and its completion for shells, from argparse's own parser: write them, or check them.

    python scripts/command_pages.py write|check

They are in python/installed, as the wheel has them: pip puts them below the environment's ``share``, where ``man`` and
bash-completion 2.12 look for what belongs to a command on PATH.
"""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Final

import shtab
from argparse_manpage.manpage import Manpage

import ctxalloc
from ctxalloc import _files
from ctxalloc._command import _parser

SHARE: Final = Path(__file__).parents[1] / "python" / "installed" / "data" / "share"
COMPLETIONS: Final = {
    "bash": "bash-completion/completions/ctxalloc",
    "zsh": "zsh/site-functions/_ctxalloc",
    "fish": "fish/vendor_completions.d/ctxalloc.fish",
}


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All options and arguments, those of the commands too."""
    found = list(parser._actions)  # noqa: SLF001 - argparse has no other way
    for action in parser._actions:  # noqa: SLF001 - as above
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            found += [inner for command in action.choices.values() for inner in actions(command)]
    return found


def pages() -> dict[Path, str]:
    """What each file has in it."""
    parser = _parser()
    for action in actions(parser):
        if action.type in (Path, _files.named) or action.dest == "program":
            action.complete = shtab.FILE  # type: ignore[attr-defined] - shtab reads this
        if action.dest == "handler":
            action.choices = [handler.name for handler in ctxalloc.handlers()]
    texts = {SHARE / name: shtab.complete(parser, shell) for shell, name in COMPLETIONS.items()}
    os.environ["COLUMNS"] = "80"
    manual = str(Manpage(_parser()))
    # The page is the version's, not the day's; and a line of text that begins with a point is no request to troff.
    head = f'.TH CTXALLOC "1" "" "ctxalloc {ctxalloc.__version__}" "User Commands"'
    manual = re.sub(r"^\.TH.*$", head, manual, flags=re.MULTILINE)
    manual = re.sub(r"^(?=\.[a-z])", r"\\&", manual, flags=re.MULTILINE)
    texts[SHARE / "man" / "man1" / "ctxalloc.1"] = manual.replace(
        "\nctxalloc\n", "\nctxalloc \\- the memory of NumPy's arrays\n", 1
    )
    return texts


def main() -> int:
    """Exit status 1: a file is not what the parser says."""
    wrong = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if sys.argv[1:] == ["write"]:
        for path, text in pages().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    for path in wrong:
        print(f"{path}: not what ctxalloc --help says; run `make command-pages`", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
