"""Copies the project as it is published: PyPI follows no relative link, so those of README.md lead to the repository.

Its address is `Repository` in `[project.urls]` of pyproject.toml, on GitHub; the links are to the tag of the version.
Without one they stay as they are, and `make release-check` refuses to release that.

usage: python scripts/published.py FOLDER
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
RELATIVE = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?!https?://|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def main() -> None:
    """Copies what git knows, with the times of its files: cargo builds only what changed."""
    (folder,) = map(Path, sys.argv[1:])
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    address = address_in(ROOT)
    if address is None:
        print("published: pyproject.toml names no repository, so README.md's links stay relative", file=sys.stderr)
        return
    version = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))["package"]["version"]
    readme = folder / "README.md"
    readme.write_text(with_absolute_links(readme.read_text(encoding="utf-8"), address, version), encoding="utf-8")


def address_in(root: Path) -> str | None:
    """Of the public repository; None: there is none yet."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    return None if address is None else str(address).rstrip("/")


def with_absolute_links(text: str, address: str, version: str) -> str:
    """A document of the project's top folder, whose links and pictures are found from elsewhere."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "tree" if (ROOT / link["path"]).is_dir() else "blob"
        where = f"{address}/{kind}/v{version}/{link['path']}{link['anchor'] or ''}"
        return f"{link['image']}{link['text']}({where})"

    # Every other part is a fenced block.
    return "".join(
        part if number % 2 else RELATIVE.sub(absolute, part) for number, part in enumerate(FENCED.split(text))
    )


if __name__ == "__main__":
    main()
