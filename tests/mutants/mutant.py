"""What a mutant is: text of the sources, and what takes its place. `run_oracle` and `run_rust` try them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to be wrong: text that is there exactly once, and what takes its place."""

    name: str
    path: str
    old: str
    new: str

    def applied(self, tree: Path) -> str:
        """The mutated file's text. RuntimeError where the tree does not have what the mutant replaces."""
        text = (tree / self.path).read_text()
        if text.count(self.old) != 1:
            raise RuntimeError(
                f"{self.path} has the text of the mutant {self.name!r} {text.count(self.old)} times, not once: adapt it"
            )
        return text.replace(self.old, self.new)
