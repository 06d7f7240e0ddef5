"""Builds the site: the guides, a reference from the package itself, and rustdoc, into ``target/site/VERSION``.

``make site`` runs it. Nothing is fetched. It fails if a link leads nowhere, or if a public name is missing.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import check
import pages
import reference

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "target/site"
SOURCE = OUT / "source"


def main() -> None:
    (version,) = sys.argv[1:]
    built = OUT / version
    for folder in (SOURCE, built, OUT / "doctrees"):
        shutil.rmtree(folder, ignore_errors=True)
    pages.write(ROOT, SOURCE)
    reference.write(SOURCE / "reference")
    here = Path(__file__).parent
    sphinx = [sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning", "--keep-going", "--quiet"]
    subprocess.run([*sphinx, "--conf-dir", here, "--doctree-dir", OUT / "doctrees", SOURCE, built], check=True)
    shutil.copytree(ROOT / "target/doc", built / "rustdoc", ignore=shutil.ignore_patterns("*.lock", ".lock"))
    _name_versions()
    problems = [*check.links(built), *reference.check(built / "objects.inv")]
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        sys.exit(f"{len(problems)} problems in {built}")
    print(f"{built / 'index.html'}: {sum(1 for _ in built.rglob('*.html'))} pages, every link leads somewhere")


def _name_versions() -> None:
    """The page above the versions: the newest one, and all that were built into this folder."""
    versions = sorted(
        (page.parent.name for page in OUT.glob("*/index.html")),
        key=lambda name: [int(part) if part.isdecimal() else -1 for part in name.split(".")],
        reverse=True,
    )
    items = "".join(f'<li><a href="{name}/index.html">ctxalloc {name}</a></li>' for name in versions)
    text = (Path(__file__).parent / "versions.html").read_text(encoding="utf-8")
    (OUT / "index.html").write_text(text.replace("@NEWEST@", versions[0]).replace("@ITEMS@", items), encoding="utf-8")


if __name__ == "__main__":
    main()
