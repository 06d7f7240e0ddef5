"""`make release-check` refuses a version whose number hides what it breaks, and guides that call it unreleased."""

import datetime as dt
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

SCRIPT = Path(__file__).parents[2] / "scripts" / "release.py"
GIT = shutil.which("git")
needs_git = pytest.mark.skipif(GIT is None, reason="there is no git, which every checkout was made with")


class Project:
    """One with no more than what a release looks at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("scripts", "tests/api", "examples/extension", "docs"):
            (root / folder).mkdir(parents=True)
        self.says("README.md", "0.1.0 is stable. Other registries have no such thing yet.")
        shutil.copy(SCRIPT, root / "scripts")
        self._git("init", "--quiet")

    def _git(self, *arguments: str) -> None:
        who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        assert GIT is not None
        subprocess.run([GIT, *arguments], cwd=self.root, env={**os.environ, **who}, check=True, timeout=60)

    def says(self, guide: str, text: str) -> None:
        (self.root / guide).write_text(text + "\n")

    def is_at(self, version: str, *names: str) -> None:
        """Commits this version, whose public names are these."""
        manifest = f'[package]\nname = "ctxalloc"\nversion = "{version}"\n'
        for file in ("Cargo.toml", "examples/extension/Cargo.toml"):
            (self.root / file).write_text(manifest)
        (self.root / "Cargo.lock").write_text(manifest.replace("[package]", "[[package]]"))
        (self.root / "CHANGELOG.md").write_text(f"## {version} ({dt.datetime.now(dt.UTC).date()})\n")
        for language in ("python", "rust"):
            (self.root / f"tests/api/{language}.txt").write_text("\n".join(["# a header", *names, ""]))
        self._git("add", ".")
        self._git("commit", "--quiet", "--message", version)

    def release(self, version: str, *names: str) -> None:
        self.is_at(version, *names)
        self._git("tag", f"v{version}")

    def check(self, version: str) -> str:
        """What `make release-check` says against it."""
        command = [sys.executable, "scripts/release.py", version]
        ran = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == bool(ran.stderr), ran
        return ran.stderr


@needs_git
@pytest.mark.parametrize(
    ("last", "next_", "lost", "gained"),
    [
        ("0.1.0", "0.1.1", "too small", ""),
        ("0.1.0", "0.2.0", "", ""),
        ("0.9.0", "0.10.0", "", ""),
        ("1.2.0", "1.2.1", "too small", "too small"),
        ("1.2.0", "1.3.0", "too small", ""),
        ("1.2.0", "2.0.0", "", ""),
    ],
)
def test_a_number_says_what_it_breaks(tmp_path: Path, last: str, next_: str, lost: str, gained: str) -> None:
    project = Project(tmp_path)
    project.release("0.0.1")
    project.release(last, "use()", "wrap()")
    for names, expected in ((["use()"], lost), (["use()", "wrap()", "more()"], gained), (["use()", "wrap()"], "")):
        project.is_at(next_, *names)
        said = project.check(next_)
        assert (expected in said) if expected else not said, (names, said)


@needs_git
def test_a_first_release_breaks_nothing(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.is_at("0.1.0", "use()")
    assert project.check("0.1.0") == ""
    (tmp_path / "Cargo.lock").write_text('[[package]]\nname = "ctxalloc"\nversion = "0.0.9"\n')
    assert "Cargo.lock has ctxalloc 0.0.9" in project.check("0.1.0")


@needs_git
@pytest.mark.parametrize(
    ("guide", "text"),
    [
        ("README.md", "0.1.0, unreleased; the interface may still change."),
        ("README.md", "It is not on a package index yet."),
        ("docs/rust.md", "It is on no registry yet:"),
    ],
)
def test_no_guide_says_that_a_release_is_none(tmp_path: Path, guide: str, text: str) -> None:
    project = Project(tmp_path)
    project.says(guide, "# A guide\n\n" + text)
    project.is_at("0.1.0")
    assert f"{guide}:3 says" in project.check("0.1.0")
    project.says(guide, "# A guide")
    project.is_at("0.1.0")
    assert project.check("0.1.0") == ""
