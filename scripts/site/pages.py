"""The pages that Sphinx reads: the guides as they are in the repository, whose links lead to pages of the site.

What a guide links to and is no guide (an example, a source file, a folder) becomes a page that shows it.
"""

import posixpath
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

# In the order of the navigation: what people come for, then what they look up, then how it is made.
NAVIGATION = {
    "What do you want?": [
        ("Limit a service", "services"),
        ("Limit all that a request allocates", "whole"),
        ("Record what requests ask of memory", "tune"),
        ("Limit tasks of Dask, Ray, Celery", "clusters"),
        ("Numbers first: see what takes memory", "observe"),
        ("See what is not counted", "coverage"),
        ("Choose an allocator", "strategies"),
        ("Use it from Python", "python"),
        ("Use it from Rust", "rust"),
        ("Use it from C", "c"),
        ("Share it with your extension module", "extension-modules"),
        ("Share memory with SYCL devices", "usm"),
        ("Copy to CUDA devices without blocking", "cuda"),
    ],
    "Look it up": [
        ("Python reference", "reference/index"),
        ("Rust reference", "rustdoc"),
        ("Words", "glossary"),
        ("Changes", "project/changelog"),
        ("Format of recordings", "recording-format"),
        ("Measurements", "project/results"),
    ],
    "How it is made": [
        ("Architecture", "project/architecture"),
        ("Decisions", "decisions/index"),
        ("Work on it", "development"),
        ("Contribute", "project/contributing"),
        ("Report a vulnerability", "project/security"),
        ("What stays", "stability"),
        ("Code of conduct", "project/conduct"),
    ],
}

_TITLES = {f"{page}.md": title for pages in NAVIGATION.values() for title, page in pages}

# Where a file of the repository is on the site; guides of docs/ are at its top.
_PLACES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "benches/RESULTS.md": "project/results.md",
    "docs/decisions/README.md": "decisions/index.md",
}
_LANGUAGES = {".py": "python", ".pyi": "python", ".rs": "rust", ".c": "c", ".h": "c", ".toml": "toml", ".sh": "bash"}
_LANGUAGES |= {".pyx": "cython", ".json": "json", ".yml": "yaml", ".yaml": "yaml"}

# Its pages are no pages of Sphinx's, so this is a plain link.
_RUSTDOC = """# Rust reference

<a href="rustdoc/ctxalloc/index.html">The crate's documentation</a>, as rustdoc makes it. Which feature adds what is in
[the guide](rust.md#add-the-crate).
"""

_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))|^(\[[^\]]+\]:\s*)(\S+)()$", re.MULTILINE)


def write(root: Path, source: Path) -> None:
    """Writes all pages into ``source``."""
    _Site(root, source).write()


class _Site:
    def __init__(self, root: Path, source: Path) -> None:
        self.root = root
        self.source = source
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        )
        self.files = frozenset(name for name in listed.stdout.splitlines() if (root / name).exists())
        self.shown: set[str] = set()

    def write(self) -> None:
        guides = [name for name in self.files if re.fullmatch(r"docs/([a-z-]+/)?[^/]+\.md", name)]
        for name in sorted({*guides, *(_PLACES.keys() & self.files)}):
            self._guide(name)
        self._add_navigation()
        shutil.copytree(self.root / "docs/images", self.source / "images")
        self._put("rustdoc.md", _RUSTDOC)

    def _put(self, place: str, text: str) -> None:
        path = self.source / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _guide(self, name: str) -> None:
        place = _place(name)
        text = (self.root / name).read_text(encoding="utf-8")
        self._put(place, _outside_of_code(text, lambda prose: self._relink(prose, name, place)))

    def _relink(self, prose: str, name: str, place: str) -> str:
        def one(match: re.Match[str]) -> str:
            before, target, after = (part or "" for part in (match.groups()[:3] if match[1] else match.groups()[3:]))
            if re.match(r"[a-z]+:", target) or target.startswith("#"):
                return match[0]
            path, _, anchor = target.partition("#")
            led = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            there = posixpath.relpath(self._page_of(led), posixpath.dirname(place) or ".")
            if before == f"[{led}](":  # a name of a file says nothing to who reads the site
                before = f"[{_TITLES.get(_place(led), led)}]("
            return f"{before}{there}{'#' + anchor if anchor else ''}{after}"

        return _LINK.sub(one, prose)

    def _page_of(self, led: str) -> str:
        """The page that shows this file or folder; it is written when it is first asked for."""
        led = str((self.root / led).resolve().relative_to(self.root))  # `include` is a link
        if led.startswith("docs/images/"):
            return led.removeprefix("docs/")
        if f"{led}/README.md" in self.files:
            led = f"{led}/README.md"
        place = _place(led)
        if led in self.shown or not place.startswith("files/"):
            return place
        self.shown.add(led)
        if led.endswith(".md"):
            self._guide(led)
            self._hide(place)
        elif led in self.files:
            self._show_file(led, place)
        else:
            self._show_folder(led, place)
        return place

    def _hide(self, place: str) -> None:
        path = self.source / place
        path.write_text("---\norphan: true\n---\n\n" + path.read_text(encoding="utf-8"), encoding="utf-8")

    def _show_file(self, name: str, place: str) -> None:
        text = (self.root / name).read_text(encoding="utf-8")
        fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1)
        language = _LANGUAGES.get(Path(name).suffix, "text")
        self._put(place, f"---\norphan: true\n---\n\n# {name}\n\n{fence}{language}\n{text}\n{fence}\n")

    def _show_folder(self, name: str, place: str) -> None:
        inside = sorted(file for file in self.files if file.startswith(f"{name}/"))
        if not inside:
            raise SystemExit(f"a guide links to {name!r}, which is no file or folder of the repository")
        shown = [file for file in inside if not file.endswith((".png", ".jpg", ".ico", ".lock"))]
        links = [
            f"- [{posixpath.relpath(file, name)}]({posixpath.relpath(self._page_of(file), posixpath.dirname(place))})"
            for file in shown
        ]
        self._put(place, "\n".join(["---", "orphan: true", "---", "", f"# {name}", "", *links, ""]))

    def _add_navigation(self) -> None:
        trees = []
        for caption, entries in NAVIGATION.items():
            lines = "\n".join(f"{text} <{page}>" for text, page in entries)
            trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n")
        with (self.source / "index.md").open("a", encoding="utf-8") as index:
            index.write("\n" + "\n".join(trees))
        decisions = sorted(path.stem for path in (self.source / "decisions").glob("0*.md"))
        with (self.source / "decisions/index.md").open("a", encoding="utf-8") as index:
            index.write("\n```{toctree}\n:hidden:\n\n" + "\n".join(decisions) + "\n```\n")


def _place(name: str) -> str:
    if name in _PLACES:
        return _PLACES[name]
    if name.startswith("docs/") and name.endswith(".md"):
        return name.removeprefix("docs/")
    return f"files/{name}" if name.endswith(".md") else f"files/{name}.md"


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        # rustdoc's ```rust,ignore is Rust
        parts += [change(text[end : fence.start()]), re.sub(r"\A([`~]+\w+),\S*", r"\1", fence[0])]
        end = fence.end()
    return "".join([*parts, change(text[end:])])
