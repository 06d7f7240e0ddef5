"""Draws docs/images/page.png: the live page of the demo's service under load, in a headless Chromium (`make page`)."""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples.tenants import app, demo, load  # noqa: E402 - run as a script, from anywhere

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def browser() -> str:
    """SystemExit: there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit(f"draw_page: none of {', '.join(BROWSERS)} is installed: make chromium")
    return found


def draw(program: str, address: str, target: Path) -> None:
    """Twenty seconds of the page's own time."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1160,980",
        ]
        command += [f"--user-data-dir={profile}", "--virtual-time-budget=20000", f"--screenshot={target}"]
        subprocess.run([*command, f"{address}{app.PAGE}/"], check=True, timeout=120, capture_output=True)


async def drawn(target: Path) -> None:
    """The demo's load, and the page meanwhile."""
    program = browser()
    run = load.Run("guarded")
    async with (
        load.started("examples.tenants.app", "guarded") as (process, address),
        httpx.AsyncClient(base_url=address, timeout=60, trust_env=False) as http,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(load.measured(run, process, http, demo.CLIENTS, seconds=12, rest=0))
        await asyncio.sleep(3)
        await asyncio.to_thread(draw, program, address, target)


def main() -> None:
    """Draws it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "page.png")
    options = parser.parse_args()
    asyncio.run(drawn(options.out))
    print(options.out)


if __name__ == "__main__":
    main()
