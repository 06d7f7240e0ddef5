"""`make release-check` refuses a version whose number hides what it breaks, and guides that call it unreleased."""

import datetime as dt
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "release.py"
PUBLISHED = ROOT / "scripts" / "published.py"
ADDRESS = "https://github.com/somebody/ctxalloc"
GIT = shutil.which("git")
needs_git = pytest.mark.skipif(GIT is None, reason="there is no git, which every checkout was made with")


class Project:
    """One with no more than what a release looks at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("scripts", "tests/api", "examples/extension", "docs"):
            (root / folder).mkdir(parents=True)
        self.says("README.md", "0.1.0 is stable. Other registries have no such thing yet.")
        self.is_found_at(ADDRESS)
        shutil.copy(SCRIPT, root / "scripts")
        self._git("init", "--quiet")

    def _git(self, *arguments: str) -> None:
        who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        assert GIT is not None
        subprocess.run([GIT, *arguments], cwd=self.root, env={**os.environ, **who}, check=True, timeout=60)

    def says(self, guide: str, text: str) -> None:
        (self.root / guide).write_text(text + "\n")

    def is_found_at(self, address: str | None, *, of_crate: str | None = None) -> None:
        """Where both manifests say that the repository is; the crate's may differ."""
        urls = "" if address is None else f'[project.urls]\nRepository = "{address}"\n'
        (self.root / "pyproject.toml").write_text(f'[project]\nname = "ctxalloc"\n{urls}')
        self._repository = of_crate or address

    def is_at(self, version: str, *names: str) -> None:
        """Commits this version, whose public names are these."""
        manifest = f'[package]\nname = "ctxalloc"\nversion = "{version}"\n'
        address = "" if self._repository is None else f'repository = "{self._repository}"\n'
        for file in ("Cargo.toml", "examples/extension/Cargo.toml"):
            (self.root / file).write_text(manifest + address)
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


@needs_git
def test_nothing_is_released_whose_readme_leads_nowhere_on_pypi(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.is_found_at(None)
    project.is_at("0.1.0")
    assert "pyproject.toml has no Repository in [project.urls]" in project.check("0.1.0")
    project.is_found_at(ADDRESS, of_crate=f"{ADDRESS}-rs")
    project.is_at("0.1.0")
    assert f"Cargo.toml has repository {ADDRESS}-rs, not {ADDRESS}" in project.check("0.1.0")


@pytest.fixture
def published() -> Any:
    spec = importlib.util.spec_from_file_location("published", PUBLISHED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_link_of_the_published_readme_leads_to_a_file_of_its_version(published: Any) -> None:
    relative = (ROOT / "README.md").read_text()
    found = published.with_absolute_links(relative, ADDRESS, "1.2.3")
    assert not re.findall(r"\]\((?!https://)[^)]*\)", found)
    links = re.findall(rf"(!?)\[[^\]]*\]\({ADDRESS}/(\w+)/v1\.2\.3/([^)#]*)", found)
    assert len(links) == len(re.findall(r"\]\((?!https://)", relative))
    for image, kind, path in links:
        assert kind == ("raw" if image else "tree" if (ROOT / path).is_dir() else "blob")
        assert (ROOT / path).exists()
    assert f"({ADDRESS}/blob/v1.2.3/docs/development.md#platforms)" in found
    fences = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert fences.findall(found) == fences.findall(relative)


@needs_git
def test_what_is_published_is_the_project_with_links_that_lead_somewhere(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    shutil.copy(PUBLISHED, project.root / "scripts")
    project.says("README.md", "See [the guide](docs/guide.md#here).")
    project.says("docs/guide.md", "See [the start](../README.md).")
    project.is_at("0.1.0")
    copy = tmp_path / "copy"
    subprocess.run([sys.executable, project.root / "scripts" / "published.py", copy], check=True, timeout=60)
    assert (copy / "README.md").read_text() == f"See [the guide]({ADDRESS}/blob/v0.1.0/docs/guide.md#here).\n"
    assert (copy / "docs" / "guide.md").read_text() == "See [the start](../README.md).\n"
    assert (copy / "Cargo.lock").exists()
