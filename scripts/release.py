"""Whether this version can be released: it is the same everywhere, and the changelog has a dated section for it."""

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
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed:
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


if __name__ == "__main__":
    main()
