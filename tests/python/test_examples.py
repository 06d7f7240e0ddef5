"""What we show works as shown: examples print what their first lines say, documents run, and what they name is there.

The examples in Rust hold themselves to their first lines (`tests/examples/said.rs`), and the Rust in the documents is
part of the doc tests (`src/lib.rs`).
"""

import asyncio
import doctest
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import documents
import numpy as np
import pytest

import ctxalloc

ROOT = Path(__file__).parents[2]
# The main job has tests of its own.
# Those that need a SYCL runtime are run by tests/usm.
NEED_SYCL = {"usm_service.py", "usm.md"}
# Those that need Dask or Ray are run by tests/clusters.
NEED_CLUSTERS = {"dask_tasks.py", "ray_tasks.py", "clusters.md"}
# Those that need the CUDA driver are run by test_cuda_states.py, on the tests' own.
NEED_CUDA = {"cuda.md"}
NOT_HERE = NEED_SYCL | NEED_CLUSTERS | NEED_CUDA
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in {"demo.py"} | NOT_HERE)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# A change log speaks of what was, also where it is no longer.
CURRENT_DOCUMENTS = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]

MAX_WORDS = 20_000


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run_python(*arguments: str | Path, folder: Path | None = None) -> str:
    """Run a program as a user does, but with warnings as errors; it must end well and complain of nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,  # it hangs
        # What threads inherit is a choice of the interpreter from 3.14 on; the examples show the usual one.
        env={**os.environ, "PYTHON_THREAD_INHERIT_CONTEXT": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=by_name)
def test_an_example_prints_what_its_first_lines_say(example: Path) -> None:
    if example.with_suffix(".c").exists() and not shutil.which(os.environ.get("CC", "cc")):
        pytest.skip("there is no C compiler")
    assert run_python(example) == documents.said(example.read_text())


def test_there_are_examples_to_run() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("document", CURRENT_DOCUMENTS, ids=by_name)
def test_the_python_in_a_document_runs_and_prints_what_the_document_says(document: Path, tmp_path: Path) -> None:
    has_python = any(block.language == "python" for block in documents.blocks(document.read_text()))
    if document.name == "services.md":
        for library in ("django", "fastapi", "flask", "httpx"):
            pytest.importorskip(library)
    if has_python and document.name not in NOT_HERE:
        run_python(ROOT / "tests" / "python" / "documents.py", document, folder=tmp_path)


def test_the_readme_has_an_example_in_each_language() -> None:
    languages = [block.language for block in documents.blocks((ROOT / "README.md").read_text())]
    assert {"python", "rust"} <= set(languages)


@pytest.mark.parametrize("name", ["README.md", "docs/rust.md", "docs/strategies.md"])
def test_every_block_of_a_document_that_rustdoc_reads_names_its_language(name: str) -> None:
    """Rustdoc takes one without for Rust."""
    for block in documents.blocks((ROOT / name).read_text()):
        assert block.language, f"{name}:{block.line}"


def test_the_guides_are_short_enough_to_be_read() -> None:
    """README.md and the guides, without their fenced blocks: words between white space."""
    guides = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    words = {guide.name: len(documents.FENCE.sub("", guide.read_text()).split()) for guide in guides}
    longest = sorted(words.items(), key=lambda of: -of[1])
    assert sum(words.values()) <= MAX_WORDS, f"say it once, and link: {longest}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document} links to {target}, which is not there"


@pytest.mark.once
@pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo says what is packed")
def test_the_links_of_a_packed_document_lead_to_what_is_packed() -> None:
    """Who has the crate without the repository can follow them."""
    command = ["cargo", "package", "--list", "--allow-dirty", "--offline", "--package", "ctxalloc"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    packed = [Path(line) for line in done.stdout.splitlines()]
    there = {*packed, *(parent for path in packed for parent in path.parents)}
    documents_packed = [path for path in packed if path.suffix == ".md"]
    assert Path("docs/rust.md") in documents_packed
    dead = []
    for document in documents_packed:
        targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", (ROOT / document).read_text())
        paths = [Path(os.path.normpath(document.parent / target)) for target in targets]
        dead += [f"{document}: {path}" for path in paths if path not in there]
    assert not dead


def test_the_links_between_headings_lead_somewhere() -> None:
    def anchors(path: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", document.read_text()):
            assert anchor in anchors(document.parent / target if target else document), f"{document}: {target}#{anchor}"


@pytest.mark.parametrize("document", CURRENT_DOCUMENTS, ids=by_name)
def test_the_make_targets_that_a_document_names_exist(document: Path) -> None:
    makefiles = "".join(path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("*.mk")))
    targets = set(re.findall(r"^([a-z0-9.-]+):", makefiles, re.MULTILINE))
    text = document.read_text()
    commands = re.findall(r"^(?:\w+=\S+ )*make((?: [a-z0-9.-]+)+)", text, re.MULTILINE)
    commands += re.findall(r"`(?:\w+=\S+ )*make((?: [a-z0-9.-]+)+)", text)
    for command in commands:
        assert set(command.split()) <= targets, f"{document}: make{command}"


@pytest.mark.parametrize("document", CURRENT_DOCUMENTS, ids=by_name)
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    roots = ("src/", "python/", "examples/", "tests/", "docs/", "scripts/", "benches/", "requirements/", "include/")
    for name in re.findall(r"`([\w./-]+)`", document.read_text()):
        if name.startswith(roots):
            assert (ROOT / name).exists(), f"{document} names {name}, which is not there"


def test_what_the_guide_shows_of_the_example_extension_is_in_it() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "examples" / "extension").glob("**/*.rs")))
    sources += (ROOT / "examples" / "extension" / "Cargo.toml").read_text()

    def squeezed(text: str) -> str:
        return re.sub(r"\s+", " ", text).strip()

    shown = documents.blocks((ROOT / "docs" / "extension-modules.md").read_text())
    quoted = [block for block in shown if block.language in ("rust,ignore", "toml")]
    assert quoted
    for block in quoted:
        assert squeezed(block.text) in squeezed(sources), f"docs/extension-modules.md:{block.line}"


# Numbers and a text, which have the docs of their types.
UNITS = {"KiB", "MiB", "GiB", "__version__"}
SHOWN = {name: getattr(ctxalloc, name).__doc__ or "" for name in ctxalloc.__all__} | {
    "ctxalloc": ctxalloc.__doc__ or ""
}


@pytest.mark.parametrize("name", [name for name, text in SHOWN.items() if ">>>" in text])
def test_the_examples_in_a_docstring_show_what_is_so(name: str) -> None:
    names = {"ctxalloc": ctxalloc, "numpy": np, "asyncio": asyncio}
    runner = doctest.DocTestRunner(verbose=False)
    text = SHOWN[name]
    if name == "register":
        text = text.replace("page", f"page of {name}'s docs")  # names are for ever, and may be taken by now
    said: list[str] = []
    runner.run(doctest.DocTestParser().get_doctest(text, names, name, None, 0), out=said.append)
    assert runner.summarize(verbose=False) == (0, runner.tries), "".join(said)


def test_docstrings_have_examples() -> None:
    assert sum(">>>" in text for text in SHOWN.values()) >= 5


def test_everything_public_has_a_docstring_of_its_own() -> None:
    public = {f"ctxalloc.{name}": getattr(ctxalloc, name) for name in ctxalloc.__all__ if name not in UNITS}
    for module in (ctxalloc.asgi, ctxalloc.problems, ctxalloc.strategies, ctxalloc.wsgi):
        public |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    for name, subject in list(public.items()):
        members = vars(subject) if isinstance(subject, type) else {}
        public |= {f"{name}.{key}": member for key, member in members.items() if not key.startswith("_")}
    without = [name for name, subject in public.items() if not subject.__doc__]
    assert not without


def test_the_guide_gives_users_the_lint_that_we_use() -> None:
    blocks = documents.blocks((ROOT / "docs" / "rust.md").read_text())
    (text,) = (block.text for block in blocks if "await-holding-invalid-types" in block.text)
    assert tomllib.loads(text) == tomllib.loads((ROOT / "clippy.toml").read_text())
