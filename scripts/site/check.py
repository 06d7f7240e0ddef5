"""Every link of the site leads to a page of it, and to a place on that page."""

from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


def links(site: Path) -> Iterator[str]:
    """What leads nowhere. rustdoc has checked its own pages; what leads there is checked here."""
    for page in sorted(site.rglob("*.html")):
        if "rustdoc" in page.relative_to(site).parts[:1]:
            continue
        for link in sorted(_read(page).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_relative_to(site) or not target.is_file():
                yield f"{page.relative_to(site)}: no such page: {link}"
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in _read(target).places:
                yield f"{page.relative_to(site)}: no such place on the page: {link}"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = {"", "top"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name in ("href", "src") and tag != "base":
                self.links.add(value)
            elif name == "id" or (tag == "a" and name == "name"):
                self.places.add(value)


@cache
def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page
