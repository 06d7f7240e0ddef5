"""Whether this version can be released.

It is the same everywhere, the changelog has a dated section for it, no guide says that it is not released, and its
number says what it breaks: what of ``tests/api`` is gone since the last release, which a tag names.
"""

import datetime as dt
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    (version,) = sys.argv[1:]
    found = list(problems(version))
    for problem in found:
        print(f"release-check: {problem}", file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"release-check: {version} everywhere, and dated in the changelog")


def problems(version: str) -> Iterator[str]:
    """What must be mended before a release."""
    for file in ("Cargo.toml", "examples/extension/Cargo.toml"):
        manifest = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))
        if manifest["package"]["version"] != version:
            yield f"{file} has version {manifest['package']['version']}, not {version}"
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text(encoding="utf-8"))["package"]
    for package in locked:
        if package["name"] == "ctxalloc" and package["version"] != version:
            yield f"Cargo.lock has ctxalloc {package['version']}, not {version}: run cargo check"
    yield from _changelog(version)
    yield from _guides()
    yield from _address()
    yield from _semver(version)
    if changed := _git("status", "--porcelain"):
        yield f"the tree has changes that are not committed: {json.dumps(changed.splitlines()[:5])}"


def _changelog(version: str) -> Iterator[str]:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.search(rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)$", text, re.MULTILINE)
    if dated is None:
        yield f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)': give Unreleased its version and date"
        return
    try:
        date = dt.date.fromisoformat(dated[1])
    except ValueError:
        yield f"CHANGELOG.md dates {version} {dated[1]}, which is no date"
        return
    if date > dt.datetime.now(dt.UTC).date():
        yield f"CHANGELOG.md dates {version} {dated[1]}, which is in the future"


def _guides() -> Iterator[str]:
    """Sentences that are wrong once it is uploaded, and would be what its page on an index says."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not_released := re.search(r"\bunreleased\b|\bon no registry yet|\bnot on a package index yet", line):
                where = f"{path.relative_to(ROOT)}:{number}"
                yield f"{where} says '{not_released[0]}': say what a reader does once it is released"


def _address() -> Iterator[str]:
    """Where the links of README.md lead from its page on PyPI, which follows no relative one (``published.py``)."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    package = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))["package"]
    if "Repository" not in urls:
        yield "pyproject.toml has no Repository in [project.urls]: on PyPI no link of README.md would lead anywhere"
    elif urls["Repository"] != package.get("repository"):
        yield f"Cargo.toml has repository {package.get('repository')}, not {urls['Repository']} as pyproject.toml"


def _semver(version: str) -> Iterator[str]:
    """What the public surface lost or gained since the last release, in a version that does not say so."""
    now = _numbers(version)
    tags = _git("tag", "--list", "v[0-9]*").split()
    last = max((tag for tag in tags if _numbers(tag[1:]) < now), key=lambda tag: _numbers(tag[1:]), default=None)
    if last is None:
        print(f"release-check: no release is older than {version}, so there is nothing that it could break")
        return
    before = _numbers(last[1:])
    # Cargo's rule: below 1.0 the second number takes the place of the first.
    breaks = now[0] == before[0] and (now[0] > 0 or now[1] == before[1])
    adds = now[:2] == before[:2] and now[0] > 0
    for language in ("python", "rust"):
        path = f"tests/api/{language}.txt"
        old = set(_git("show", f"{last}:{path}").splitlines()[1:])
        new = set((ROOT / path).read_text(encoding="utf-8").splitlines()[1:])
        if breaks and (gone := sorted(old - new)):
            yield f"{version} breaks what {last} promised, so its number is too small. Gone from {path}: {gone[:5]}"
        if adds and (added := sorted(new - old)):
            yield f"{version} adds to what {last} promised, so its number is too small. New in {path}: {added[:5]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
