"""Takes each guard of the tower layer and of `GlobalScoped` out, one at a time, in a copy of the tree.

A test must notice. At the end it names the tests that no mutant turned red: those hold
nothing. `run_rust.py NAME...` runs some mutants.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import Final

import heap
from mutant import TREE, Mutant

import tower

PLACE: Final = TREE / "target" / "mutants-rust"
SECONDS: Final = 120

MUTANTS: Final = tower.MUTANTS + heap.MUTANTS
CLONE: Final = (
    "    S: Service<Request<A>, Response = Response<B>>,\n    S::Future: Future",
    "    S: Clone + Service<Request<A>, Response = Response<B>>,\n    S::Future: Future",
)


def binary_of(mutant: Mutant) -> str:
    """The test binary that should notice."""
    return "tower" if mutant.path.startswith("src/tower") else "heap"


def prepare() -> None:
    """Copies the tree, and what cargo has built of it."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=TREE, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        to = PLACE / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if (TREE / name).is_symlink():
            to.unlink(missing_ok=True)
            to.symlink_to((TREE / name).readlink())
        elif not to.exists() or to.read_bytes() != (TREE / name).read_bytes():
            shutil.copyfile(TREE / name, to)
    if not (PLACE / "target").exists() and (TREE / "target" / "debug").exists():
        shutil.copytree(TREE / "target" / "debug", PLACE / "target" / "debug", copy_function=shutil.copy2)


def run(binary: str, under_load: bool) -> tuple[set[str], set[str]] | str:
    """The tests that failed, and all of them; or why there are none."""
    command = ["cargo", "test", "--quiet", "--locked", "--features", "axum,rayon", "--test", binary]
    built = subprocess.run([*command, "--no-run"], cwd=PLACE, check=False, capture_output=True, text=True)
    if built.returncode:
        return "it does not compile:\n" + built.stderr[-2000:]
    ran = subprocess.run(
        [
            "timeout",
            str(SECONDS),
            *command,
            "--",
            "--test-threads=2",
            "--format=pretty",
            *([] if under_load else ["--skip", "load::"]),
        ],
        cwd=PLACE,
        check=False,
        capture_output=True,
        text=True,
    )
    outcomes = dict(re.findall(r"^test (\S+) \.\.\. .*?(ok|FAILED)$", ran.stdout, re.MULTILINE | re.DOTALL))
    failed = {f"{binary}::{name}" for name, how in outcomes.items() if how == "FAILED"}
    failed |= {f"{binary}::{name}" for name in re.findall(r"^---- (\S+) stdout", ran.stdout, re.MULTILINE)}
    if ran.returncode and not failed:
        begun = set(re.findall(r"^test (\S+) \.\.\. ", ran.stdout, re.MULTILINE)) - set(outcomes)
        failed = {f"{binary}::{name}" for name in begun} or {f"{binary}: exit status {ran.returncode}"}
    return failed, {f"{binary}::{name}" for name in outcomes}


def main() -> int:
    """Run them all, or those that are named."""
    chosen = [mutant for mutant in MUTANTS if len(sys.argv) == 1 or mutant.name in sys.argv[1:]]
    if not chosen:
        print("no mutant is named so; there are", *(mutant.name for mutant in MUTANTS), sep="\n")
        return 2
    prepare()
    everything: set[str] = set()
    for binary in sorted({binary_of(mutant) for mutant in chosen}):
        sound = run(binary, True)
        if isinstance(sound, str) or sound[0]:
            print(f"without any mutant, {binary}: {sound}")
            return 1
        everything |= sound[1]
    red: set[str] = set()
    survivors = []
    for mutant in chosen:
        sound_text = (PLACE / mutant.path).read_text()
        text = mutant.applied(PLACE)
        if "clone()" in mutant.new:
            text = text.replace(*CLONE)
        (PLACE / mutant.path).write_text(text)
        seen = run(binary_of(mutant), isinstance(mutant, tower.UnderLoad))
        (PLACE / mutant.path).write_text(sound_text)
        if isinstance(seen, str):
            print(f"BROKEN    {mutant.name}: {seen}", flush=True)
            survivors.append(mutant.name)
            continue
        failed, _ = seen
        red |= failed
        print(f"{'noticed ' if failed else 'SURVIVED'}  {mutant.name}: {', '.join(sorted(failed))}", flush=True)
        if not failed:
            survivors.append(mutant.name)
    never = ", ".join(sorted(everything - red)) or "none"
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed; never red: {never}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
