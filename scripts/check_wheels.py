"""Check the wheels and the sdist of a folder: what each needs of its system, and that it works where it can run here.

`make wheels-all` runs it. Every wheel: only the stable ABI (abi3audit), and the symbol versions that its tag promises
(auditwheel). Then tests/wheels/smoke.py: x86-64 manylinux and the sdist in fresh environments; aarch64 manylinux under
qemu, in Debian's Python. There is no Python with musl here: those wheels are only loaded, by musl's own loader.
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ROOT / "tests" / "wheels" / "smoke.py"
ARM = ROOT / "target" / "pythons" / "aarch64"
PINNED = (ROOT / "requirements" / "numpy.txt").read_text()
NUMPY = next(line for line in PINNED.splitlines() if line.startswith("numpy"))
# A system of musl, by its loader: in Debian's package `musl`.
MUSL = {"x86_64": Path("/lib/ld-musl-x86_64.so.1"), "aarch64": ARM / "lib" / "ld-musl-aarch64.so.1"}


def run(*command: str | Path, **environment: str) -> str:
    """What a command says; its failure ends this program, with all that it said."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed ({done.returncode}):\n{done.stdout}")
    return done.stdout


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ctxalloc-wheel-") as name:
        yield Path(name)


def smoke_installed(package: Path) -> str:
    """Install a wheel or an sdist in a fresh environment, where nothing else is, and try it."""
    with folder() as place:
        venv.create(place, with_pip=True)
        python = place / "bin" / "python"
        run(python, "-m", "pip", "install", NUMPY, package)
        return run(python, "-I", SMOKE)


def smoke_emulated(wheel: Path) -> str:
    """Install an aarch64 wheel and NumPy's in a folder, and try them in Debian's Python under qemu."""
    with folder() as place:
        platforms = [f"--platform={old}_aarch64" for old in ("manylinux_2_28", "manylinux_2_27", "manylinux2014")]
        options = ["--target", place, "--only-binary=:all:", "--python-version", "3.11", *platforms]
        run(sys.executable, "-m", "pip", "install", *options, NUMPY, wheel)
        python = ARM / "usr" / "bin" / "python3.11"
        return run(python, SMOKE, QEMU_LD_PREFIX=str(ARM), PYTHONPATH=str(place))


def load_with_musl(wheel: Path, loader: Path) -> str:
    """Whether musl's loader finds all that the module needs, except what a Python would bring."""
    with folder() as place:
        zipfile.ZipFile(wheel).extractall(place)
        (module,) = place.glob("ctxalloc/_native*.so")
        said = subprocess.run(
            [loader, "--list", module], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            env=os.environ | {"QEMU_LD_PREFIX": str(ARM)},
        )  # fmt: skip
    missing = [line for line in said.stdout.splitlines() if "not found" in line]
    foreign = [line for line in missing if ": Py" not in line and ": _Py" not in line]
    if foreign or not missing or "Error loading" in said.stdout:
        sys.exit(f"{loader} cannot load {wheel.name}:\n{said.stdout}")
    return f"loaded by {loader.name}: only {len(missing)} symbols of Python are missing, as they must be without one"


def audit(wheel: Path) -> str:
    """The stable ABI, and the tag."""
    run("abi3audit", "--strict", wheel)
    said = " ".join(run("auditwheel", "show", wheel).split())
    tag = wheel.stem.rsplit("-", 1)[1].split(".")[0]
    if f'"{tag}"' not in said:
        sys.exit(f"{wheel.name} does not keep what its tag promises:\n{said}")
    return tag


def main() -> None:
    """Check everything in the folder that the command line names."""
    (place,) = sys.argv[1:]
    wheels = sorted(Path(place).glob("*.whl"))
    (sdist,) = Path(place).glob("*.tar.gz")
    for wheel in wheels:
        tag = audit(wheel)
        machine = "aarch64" if tag.endswith("aarch64") else "x86_64"
        print(f"{wheel.name}: abi3 and {tag}, {wheel.stat().st_size >> 10} KiB", flush=True)
        if "musl" in tag:
            loader = MUSL[machine]
            print("  ", load_with_musl(wheel, loader) if loader.exists() else f"not loaded: {loader} is not here")
        else:
            print("  ", (smoke_emulated if machine == "aarch64" else smoke_installed)(wheel).strip(), flush=True)
    print(f"{sdist.name}\n  ", smoke_installed(sdist).strip())


if __name__ == "__main__":
    main()
