"""Run scripts of others, unchanged, by ``ctxalloc run``: each must do what it does under ``python``.

    run.py                     all scripts, as `make test-scripts` does
    run.py plot_hog.py ...   some of them

The scripts are the gallery examples of scikit-learn and scikit-image, from the source archives of the versions that are
installed. Each runs under plain ``python``, under ``ctxalloc run --report``, and under ``ctxalloc run --handler pool
--limit ... --report``. Its exit status, what it prints and every pixel of its figures must be the same (figures.py),
and the report must have its arrays, with sites in the script or its package.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import time
import urllib.parse
import urllib.request
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "target" / "scripts"
TIMEOUT = 600  # seconds of one run

# Examples that need no download, draw with matplotlib, print no times and draw no lots without a seed.
SCRIPTS = {
    "scikit-learn": (
        "examples/classification/plot_digits_classification.py",
        "examples/classification/plot_lda_qda.py",
        "examples/cluster/plot_agglomerative_dendrogram.py",
        "examples/cluster/plot_dbscan.py",
        "examples/covariance/plot_mahalanobis_distances.py",
        "examples/decomposition/plot_ica_blind_source_separation.py",
        "examples/decomposition/plot_incremental_pca.py",
        "examples/ensemble/plot_forest_iris.py",
    ),
    "scikit-image": (
        "doc/examples/color_exposure/plot_equalize.py",
        "doc/examples/color_exposure/plot_rgb_to_hsv.py",
        "doc/examples/edges/plot_contours.py",
        "doc/examples/edges/plot_convex_hull.py",
        "doc/examples/features_detection/plot_gabor.py",
        "doc/examples/features_detection/plot_hog.py",
        "doc/examples/filters/plot_unsharp_mask.py",
        "doc/examples/segmentation/plot_watershed.py",
    ),
}
LIMIT = "4GiB"  # far above what they take: it must not change anything


def archive(package: str) -> bytes:
    """The source archive of the installed version, by the index that pip asks; its hash is checked."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{package}/"
    with urllib.request.urlopen(page, timeout=100) as answer:
        links = re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"', answer.read().decode())
    name = f"{package.replace('-', '_')}-{version(package)}.tar.gz"
    link, digest = next((link, digest) for link, digest in links if link.endswith(f"/{name}"))
    with urllib.request.urlopen(urllib.parse.urljoin(page, link), timeout=500) as answer:
        packed: bytes = answer.read()
    if hashlib.sha256(packed).hexdigest() != digest:
        sys.exit(f"{name}: not what the index says it is")
    return packed


def unpack(package: str) -> list[Path]:
    """The scripts of one package, unpacked where they are not yet."""
    folder = FOLDER / f"{package}-{version(package)}"
    paths = [folder / PurePosixPath(name).name for name in SCRIPTS[package]]
    if not all(path.exists() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(archive(package))) as packed:
            root = packed.getnames()[0].split("/")[0]
            for name, path in zip(SCRIPTS[package], paths, strict=True):
                member = packed.extractfile(f"{root}/{name}")
                if member is None:
                    sys.exit(f"{package} {version(package)} has no {name}")
                path.write_bytes(member.read())
    return paths


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "MPLBACKEND": "module://figures",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "PYTHONHASHSEED": "1",
        # Sums in another order differ in the last bit.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment
    )


def complaints(script: Path) -> list[str]:
    """What is wrong with one script."""
    plain = run(script)
    if plain.returncode != 0 or "figure 1 " not in plain.stdout:
        return [f"does not run under plain python (status {plain.returncode}): {plain.stderr.strip()[-500:]}"]
    found = []
    for options in ([], ["--handler", "pool", "--limit", LIMIT]):
        ours = run("-m", "ctxalloc", "run", *options, "--report", script)
        lines = zip_longest(plain.stdout.splitlines(), ours.stdout.splitlines())
        differing = [pair for pair in lines if pair[0] != pair[1]]
        if ours.returncode != 0 or differing:
            found.append(f"{options}: status {ours.returncode}, {differing[:1]}: {ours.stderr.strip()[-500:]}")
        counted = re.search(r"arrays: .* in ([0-9]+) arrays, .* ([0-9]+) refused", ours.stderr)
        if counted is None or int(counted[1]) < 100 or counted[2] != "0":
            found.append(f"{options}: no arrays in the report: {ours.stderr.strip()[:500]}")
        if f"(handler {'pool' if options else 'as the program selects'}" not in ours.stderr:
            found.append(f"{options}: another handler in the report: {ours.stderr.strip()[:500]}")
        if not re.search(rf"(sklearn/[\w/]+|skimage/[\w/]+|{script.stem})\.py:[0-9]+ ", ours.stderr):
            found.append(f"{options}: no site in the script or its package: {ours.stderr.strip()[-1000:]}")
    return found


def main() -> int:
    """0 if every script does what it does under ``python``."""
    scripts = [path for package in SCRIPTS for path in unpack(package)]
    chosen = [path for path in scripts if not sys.argv[1:] or path.name in sys.argv[1:]]
    if not chosen:
        sys.exit(f"none of {', '.join(path.name for path in scripts)} is named {' '.join(sys.argv[1:])}")
    wrong = 0
    for number, path in enumerate(chosen, 1):
        began = time.monotonic()
        found = complaints(path)
        wrong += bool(found)
        print(f"{number}/{len(chosen)} {path.parent.name} {path.name}: ", end="")
        print("WRONG" if found else "the same", f"in {time.monotonic() - began:.0f} s", flush=True)
        for complaint in found:
            print(f"    {complaint}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} scripts do under ctxalloc run what they do under python")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
