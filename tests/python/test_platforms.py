"""What platforms.mk runs on other machines, as far as this one can tell."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent.parent

WITHOUT_HYPOTHESIS = """
import sys, pytest

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "hypothesis":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.exit(pytest.main(["-p", "no:hypothesispytest", "-p", "no:cacheprovider", "--collect-only", "-q", *sys.argv[1:]]))
"""


def test_the_bare_suite_needs_no_hypothesis() -> None:
    """The CPython with musl cannot install it (`make test-musl-python`)."""
    (names,) = re.findall(r"^bare_suite := ((?:.*\\\n)*.*)$", (ROOT / "platforms.mk").read_text(), re.MULTILINE)
    files = [ROOT / f"tests/python/test_{name}.py" for name in names.replace("\\", "").split()]
    assert len(files) > 15
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HYPOTHESIS, *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_classifiers_name_every_python_that_was_tested() -> None:
    """A wheel's page on an index shows them; docs/development.md says which were tested."""
    table = (ROOT / "docs" / "development.md").read_text()
    tested = set(re.findall(r"^\| CPython (3\.\d+)\S* \| tested \|", table, re.MULTILINE))
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()))
    assert tested
    assert tested <= named


APT = """\
#!/bin/sh
case "$*" in
    indextargets*) echo "$KNOWN" ;;
    *update) cp "$LISTS/apt/sources.list" "$SEEN" ;;
    *--download-only*) touch "$LISTS/apt/archives/one.deb" ;;
esac
"""


@pytest.mark.parametrize(
    ("known", "mirror"),
    [
        ("http://mirror.example/debian/", "http://mirror.example/debian/"),
        ("http://archive.ubuntu.example/ubuntu/", "https://deb.debian.org/debian/"),
    ],
    ids=["Debian", "Ubuntu"],
)
def test_debians_packages_are_found_on_an_ubuntu_too(known: str, mirror: str, tmp_path: Path) -> None:
    """The wheels for musl and aarch64 are tried with them: also by release.yml, on an Ubuntu."""
    (tmp_path / "bin").mkdir()
    for name, text in (("apt-get", APT), ("dpkg-deb", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    seen, keys, lists = tmp_path / "seen", tmp_path / "keys.gpg", tmp_path / "root"
    environment = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "KNOWN": known,
        "SEEN": str(seen),
        "LISTS": str(lists),
        "DEBIAN_KEYS": str(keys),
    }
    command = ["bash", ROOT / "scripts" / "debian_root.sh", lists, "arm64", "bookworm", "musl"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    assert "apt-get install debian-archive-keyring" in run().stderr
    keys.touch()
    assert run().returncode == 0
    assert seen.read_text() == f"deb [signed-by={keys}] {mirror} bookworm main\n"
