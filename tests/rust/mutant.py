"""What a mutant is: one guard of the sources taken out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).resolve().parents[2]
PLACE: Final = TREE / "target" / "mutants-rust"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard that is taken out: text that is there exactly once, and what takes its place."""

    name: str
    path: str
    old: str
    new: str
    under_load: bool = False
    """Whether the load test runs too, which takes longer than all others."""

    @property
    def binary(self) -> str:
        """The test binary that should notice."""
        return "tower" if self.path.startswith("src/tower") else "heap"

    def applied(self, tree: Path = PLACE) -> str:
        """The mutated file's text. RuntimeError where the tree does not have what the mutant replaces."""
        text = (tree / self.path).read_text()
        if text.count(self.old) != 1:
            raise RuntimeError(f"{self.path} has the text of {self.name!r} {text.count(self.old)} times: adapt it")
        return text.replace(self.old, self.new)
