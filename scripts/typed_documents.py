"""Check the Python of documents with `mypy --strict`: what we show must also satisfy a reader's type checker.

`python scripts/typed_documents.py README.md` puts the Python blocks of each document into a module under target/, at
their own lines, so that mypy's messages name the line of the document. `make types` runs it; the tests run the blocks.
"""

import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
ROOT = Path(__file__).parents[1]


def as_module(document: str) -> str:
    """The Python blocks of a document, each at its own line; whatever is between them becomes empty lines."""
    lines = [""] * (document.count("\n") + 1)
    for match in BLOCK.finditer(document):
        first = document.count("\n", 0, match.start("text"))
        for offset, line in enumerate(match["text"].splitlines()):
            lines[first + offset] = line
    return "\n".join(lines)


def main() -> int:
    """Mypy's exit status for the documents named on the command line."""
    folder = ROOT / "target" / "typed_documents"
    folder.mkdir(parents=True, exist_ok=True)
    modules = []
    for name in sys.argv[1:]:
        module = folder / f"{Path(name).stem.replace('-', '_').lower()}_md.py"
        module.write_text(as_module((ROOT / name).read_text()))
        modules.append(module)
    return subprocess.run([sys.executable, "-m", "mypy", "--strict", *modules], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
