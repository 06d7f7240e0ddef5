"""Check the wheels and the sdist that are named: what each needs of its system, and that it works, if it can run here.

`make wheels-all` runs it. Each wheel uses only the stable ABI (abi3audit) and no newer C library than its tag says
(auditwheel). Then tests/wheels/smoke.py runs with it: in a fresh environment and an empty home, on an emulated aarch64,
or on a CPython with musl. What cannot be tried here is said. There is no CPython for musl on aarch64: that wheel is
loaded by musl's own loader, and nothing of it is called.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ROOT / "tests" / "wheels" / "smoke.py"
# As platforms.mk makes them; each may be missing.
ARM = ROOT / "target" / "pythons" / "aarch64"
ARM_PYTHON = ARM / "usr" / "bin" / "python3.11"
ARM_MUSL_LOADER = ARM / "lib" / "ld-musl-aarch64.so.1"
MUSL_PYTHON = ROOT / "target" / "pythons" / "musl" / "bin" / "python3.13"
EMULATOR = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
# Which target makes it, or says what to install for it.
MADE_BY = {EMULATOR: "aarch64-tools"}

PINNED = (ROOT / "requirements" / "numpy.txt").read_text().splitlines()
NUMPY = next(line for line in PINNED if line.startswith("numpy"))


class MissingHereError(Exception):
    """Something that this machine lacks."""


def run(*command: str | Path, **environment: str) -> str:
    """What a command says; its failure ends this program, with all that it said."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed ({done.returncode}):\n{done.stdout}")
    return done.stdout.strip()


def need(*paths: Path) -> None:
    """Raise `MissingHereError` for the first that is missing."""
    for path in paths:
        if not path.exists():
            made_by = MADE_BY.get(path, "wheel-pythons")
            raise MissingHereError(f"{path} is not here, and `make {made_by}` says why")


def try_installed(package: Path, folder: Path) -> str:
    """Install a wheel or an sdist in a fresh environment, with a home in which nothing is but where Rust is."""
    home = folder / "home"
    home.mkdir()
    rust = {"CARGO_HOME": str(home / "cargo"), "RUSTUP_HOME": run("rustup", "show", "home")}
    clean = {"HOME": str(home), "PIP_NO_CACHE_DIR": "1", **rust}
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", NUMPY, package, **clean)
    return run(python, "-I", SMOKE, **clean)


def put_into(folder: Path, wheel: Path, version: str, *platforms: str) -> None:
    """Install a wheel and NumPy in a folder, for a Python of another system."""
    wanted = [f"--platform={platform}" for platform in platforms]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *wanted]
    run(sys.executable, "-m", "pip", "install", "--target", folder, *options, NUMPY, wheel)


def try_emulated(wheel: Path, folder: Path) -> str:
    """Run it in Debian's Python for aarch64, under qemu."""
    need(ARM_PYTHON, EMULATOR)
    put_into(folder, wheel, "3.11", "manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64")
    return run(ARM_PYTHON, SMOKE, QEMU_LD_PREFIX=str(ARM), PYTHONPATH=str(folder))


def try_with_musl(wheel: Path, folder: Path) -> str:
    """Run it in a CPython that was built with musl."""
    need(MUSL_PYTHON)
    put_into(folder, wheel, "3.13", "musllinux_1_2_x86_64")
    return run(MUSL_PYTHON, SMOKE, PYTHONPATH=str(folder))


def load_emulated_with_musl(wheel: Path, folder: Path) -> str:
    """Load it with musl's loader: it must find all but what a Python would bring."""
    need(ARM_MUSL_LOADER, EMULATOR)
    zipfile.ZipFile(wheel).extractall(folder)
    (module,) = folder.glob("ctxalloc/_native*.so")
    said = subprocess.run(
        [ARM_MUSL_LOADER, "--list", module], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout
    missing = [line.split(": ")[-2] for line in said.splitlines() if "symbol not found" in line]
    foreign = [symbol for symbol in missing if not symbol.startswith(("Py", "_Py"))]
    if foreign or not missing or "Error loading" in said:
        sys.exit(f"{ARM_MUSL_LOADER} cannot load {wheel.name}:\n{said}")
    return f"loaded by {ARM_MUSL_LOADER.name}, which misses {len(missing)} symbols of Python and no other; not run"


# By the end of the tag that a wheel's name promises.
WAYS: dict[str, Callable[[Path, Path], str]] = {
    "manylinux_2_17_x86_64": try_installed,
    "manylinux_2_17_aarch64": try_emulated,
    "musllinux_1_2_x86_64": try_with_musl,
    "musllinux_1_2_aarch64": load_emulated_with_musl,
}


def audit(wheel: Path, tag: str) -> None:
    """Only the stable ABI; no newer C library than the tag says, and no other library."""
    run("abi3audit", "--strict", wheel)
    # It would look for libraries among this machine's, which are not musl's. It knows musl's library by the name that
    # Alpine gives it; `libc.so` is the one that musl's loader has built in.
    said = run("auditwheel", "show", "--json", "--ldpaths", "/nowhere", wheel)
    found = json.loads(said[said.index("{") :])
    allowed = {"libc.so"} if "musl" in tag else set()
    if found["sym_tag"] != tag or not allowed >= found["external_libs"].keys():
        sys.exit(f"{wheel.name} does not keep what its tag promises:\n{said}")


def check(package: Path, way: Callable[[Path, Path], str]) -> bool:
    """Try it in a folder of its own, and say how that went; False where it could not be tried."""
    print(f"{package.name}, {package.stat().st_size >> 10} KiB", flush=True)
    with tempfile.TemporaryDirectory(prefix="ctxalloc-wheel-") as folder:
        try:
            print(f"    {way(package, Path(folder))}", flush=True)
        except MissingHereError as lack:
            print(f"    NOT TRIED: {lack}", flush=True)
            return False
    return True


def main() -> None:
    """Check everything that the command line names."""
    packages = [Path(name) for name in sys.argv[1:]]
    by_tag = {wheel.stem.split("-")[-1].split(".")[-1]: wheel for wheel in packages if wheel.suffix == ".whl"}
    sdists = [package for package in packages if package.suffix == ".gz"]
    if by_tag.keys() != WAYS.keys() or len(sdists) != 1:
        sys.exit(
            f"there are wheels for {sorted(by_tag)} and {len(sdists)} sdists, not wheels for {sorted(WAYS)} and one"
        )
    for tag, wheel in by_tag.items():
        audit(wheel, tag)
    tried = [check(wheel, WAYS[tag]) for tag, wheel in by_tag.items()] + [check(sdists[0], try_installed)]
    print(f"{len(by_tag)} wheels keep to the stable ABI and their tags; tried: {sum(tried)} of {len(tried)} packages")


if __name__ == "__main__":
    main()
