"""A profile by stacks for tools and eyes: folded stacks, pprof's protobuf, and a page with a flame graph.

The end of a file's name says which. ``_profile`` makes what is written here; the page asks nobody for anything.
"""

import html
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from ctxalloc._profile import OUTSIDE, Frame, Profile, Sums
from ctxalloc._text import size_text

FRAMES: Final = 64
"""How many of the innermost calls each stack has."""

SUFFIXES: Final = (".html", ".folded", ".pb.gz")
"""A flame graph; a line for each stack and its bytes at the peak; pprof."""

_NARROWEST: Final = 0.001
"""What share of the whole a call needs to be drawn: the page stays small, however many sites there are."""


def has_format(path: Path) -> bool:
    """Whether the name says how to write it."""
    return path.name.endswith(SUFFIXES)


def written_as(path: Path, profile: Profile, title: str) -> bytes:
    """What belongs in a file of this name, which ``has_format``."""
    if path.name.endswith(".html"):
        return page(profile, title).encode("utf-8", "backslashreplace")
    if path.name.endswith(".folded"):
        return folded(profile).encode("utf-8", "backslashreplace")
    return pprof(profile)


def _name(frame: Frame) -> str:
    file, line, function = frame
    return f"{function} ({file}:{line})" if file else function


def _calls(frames: Sequence[Frame]) -> list[str]:
    """The names of the calls, the outermost first."""
    return [_name(frame) for frame in reversed(frames or [OUTSIDE])]


def folded(profile: Profile) -> str:
    """A line for each stack that had something at the peak: its calls, the outermost first, and the bytes."""
    sums: dict[str, int] = {}
    for frames, numbers in profile.stacks:
        # A semicolon separates calls, and a line's end stacks.
        calls = (" ".join(call.replace(";", ",").split()) for call in _calls(frames))
        stack = ";".join(calls)
        sums[stack] = sums.get(stack, 0) + numbers.at_peak_bytes
    return "".join(f"{stack} {size}\n" for stack, size in sorted(sums.items()) if size)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _field(number: int, content: int | bytes) -> bytes:
    """A field of a protobuf message; nothing for a 0, which is the default."""
    if isinstance(content, bytes):
        return _varint(number << 3 | 2) + _varint(len(content)) + content
    return _varint(number << 3) + _varint(content) if content else b""


def _packed(number: int, values: Iterable[int]) -> bytes:
    return _field(number, b"".join(map(_varint, values)))


class _Numbers:
    """A number for each different thing, in this order from ``first`` on."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.found: dict[Any, int] = {}

    def of(self, thing: Hashable) -> int:
        return self.found.setdefault(thing, len(self.found) + self.first)


def pprof(profile: Profile) -> bytes:
    """The stacks of a profile: see ``pprof_of``."""
    return pprof_of(profile.stacks)


def pprof_of(stacks: Iterable[tuple[Sequence[Frame], Sums]]) -> bytes:
    """The message ``perftools.profiles.Profile``, compressed, as pprof's ``profile.proto`` describes it."""
    texts, functions, locations = _Numbers(0), _Numbers(1), _Numbers(1)
    texts.of("")  # the format wants it first
    kinds = ("alloc_objects", "count"), ("alloc_space", "bytes"), ("inuse_space", "bytes"), ("peak_space", "bytes")
    message = [_field(1, _field(1, texts.of(kind)) + _field(2, texts.of(unit))) for kind, unit in kinds]
    for frames, sums in stacks:
        ids = [locations.of(frame) for frame in frames or [OUTSIDE]]
        values = (sums.arrays, sums.total_bytes, sums.live_bytes, sums.at_peak_bytes)
        message.append(_field(2, _packed(1, ids) + _packed(2, values)))
    for frame, location in locations.found.items():
        file, line, name = frame
        function = functions.of((file, name))
        message.append(_field(4, _field(1, location) + _field(4, _field(1, function) + _field(2, line))))
    for of_file, function in functions.found.items():
        file, name = of_file
        text = texts.of(name)
        message.append(_field(5, _field(1, function) + _field(2, text) + _field(3, text) + _field(4, texts.of(file))))
    peak = texts.of("peak_space")
    message += [_field(6, text.encode("utf-8", "backslashreplace")) for text in texts.found]
    message.append(_field(14, peak))
    import gzip  # noqa: PLC0415 - a CPython may have been built without zlib; all else works there

    return gzip.compress(b"".join(message), mtime=0)


class _Node:
    __slots__ = ("children", "size")

    def __init__(self) -> None:
        self.size = 0
        self.children: dict[str, _Node] = {}


def _tree(stacks: Iterable[tuple[Sequence[Frame], int]]) -> _Node:
    root = _Node()
    for frames, size in stacks:
        node = root
        node.size += size
        for call in _calls(frames):
            node = node.children.setdefault(call, _Node())
            node.size += size
    return root


def _drawn(name: str, root: _Node) -> str:
    """The calls as nested boxes, each as wide as its share of what is around it. Stacks are short: it may recurse."""

    def box(name: str, node: _Node, around: int) -> str:
        label = html.escape(f"{name}: {size_text(node.size)}, {node.size / root.size:.1%}")
        below = sorted(node.children.items(), key=lambda one: (-one[1].size, one[0]))
        inner = "".join(box(*one, node.size) for one in below if one[1].size >= root.size * _NARROWEST)
        inner = f"<div class=row>{inner}</div>" if inner else ""
        colour = sum(name.encode("utf-8", "backslashreplace")) % 50
        return (
            f'<div class=call style="flex-basis:{node.size / around * 100:.4f}%">'
            f'<button style="--h:{colour}" title="{label}">{label}</button>{inner}</div>'
        )

    return f"<div class=row>{box(name, root, root.size)}</div>" if root.size else "<p>nothing</p>"


_PAGE: Final = """\
<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<meta name=viewport content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 14px system-ui, sans-serif }}
h1 {{ font-size: 1.2rem; overflow-wrap: anywhere }} h2 {{ font-size: 1rem }}
.row {{ display: flex; overflow: hidden }}
.call {{ flex: 0 0 0; min-width: 0 }}
.call.out {{ display: none }} .call.whole {{ flex-basis: 100% !important }}
button {{ display: block; width: 100%; height: 1.4rem; padding: 0 2px; border: 0; text-align: left; font: inherit;
  box-shadow: inset -1px -1px Canvas; overflow: hidden; white-space: nowrap; text-overflow: ellipsis; color: #111;
  unicode-bidi: isolate; background: hsl(var(--h) 85% 65%) }}
button:hover, button:focus-visible {{ outline: 2px solid; outline-offset: -2px }}
</style>
<h1>{title}</h1>
<p>{summary} A box is a call, as wide as its share; the calls that it made are below it. A click on one makes it as wide
as the page, and a click on the uppermost shows all again. Calls below 0.1 % are left out.
<h2>At the peak</h2>
{at_peak}
<h2>Alive at the end</h2>
{live}
<h2>Allocated in all</h2>
{total}
<script>
"use strict";
for (const button of document.querySelectorAll("button")) button.addEventListener("click", () => {{
  const graph = [...document.querySelectorAll("body > .row")].find(one => one.contains(button));
  for (const call of graph.querySelectorAll(".call")) call.classList.remove("out", "whole");
  for (let call = button.parentElement; call; call = call.parentElement.closest(".call")) {{
    call.classList.add("whole");
    for (const other of call.parentElement.children) if (other !== call) other.classList.add("out");
  }}
}});
</script>
</html>
"""


def page(profile: Profile, title: str) -> str:
    """A page of HTML that needs nothing else."""
    sums = profile.all
    what = "Arrays, native memory and objects" if profile.parts else "Arrays"
    summary = (
        f"{what}: {size_text(sums.peak_bytes)} at the peak, {size_text(sums.total_bytes)} in {sums.arrays}, "
        f"{size_text(sums.live_bytes)} alive at the end, {profile.refused} refused."
    )
    if not profile.is_complete:
        summary += " Incomplete: the program set an event hook of its own."

    def graph(size: int) -> str:
        return _drawn("all", _tree((frames, sums[size]) for frames, sums in profile.stacks))

    return _PAGE.format(
        title=html.escape(title),
        summary=html.escape(summary),
        at_peak=graph(Sums._fields.index("at_peak_bytes")),
        live=graph(Sums._fields.index("live_bytes")),
        total=graph(Sums._fields.index("total_bytes")),
    )
