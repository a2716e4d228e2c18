"""Take the picture of a report: what Chromium shows of it, as a PNG of few colours.

    lpfs select census_income_kdd.parquet --label label --split split --keep 10 --out run
    python tools/picture.py run/report.html docs/images/report.png

It needs ``chromium`` (apt-get install chromium) and Pillow, which comes with matplotlib.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", default="1240x1120", help="of the window")
    parser.add_argument("--scale", type=float, default=1.5, help="pixels a point")
    parser.add_argument("--colours", type=int, default=128)
    given = parser.parse_args()
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit("there is no chromium here; install: apt-get install chromium")
    take(program, given.page, given.picture, given.size.replace("x", ","), given.scale)
    fewer_colours(given.picture, given.colours)
    print(f"{given.picture}: {given.picture.stat().st_size / 1000:.0f} kB")


def take(program: str, page: Path, picture: Path, size: str, scale: float) -> None:
    """Let the browser draw the page, light, and write what it shows."""
    with tempfile.TemporaryDirectory(prefix="lpfs-") as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        options += [f"--window-size={size}", f"--force-device-scale-factor={scale}", f"--user-data-dir={profile}"]
        command = [program, *options, f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def fewer_colours(picture: Path, colours: int) -> None:
    """Write the picture again with a palette: a third of the bytes, no difference that one could see."""
    from PIL import Image

    with Image.open(picture) as full:
        small = full.convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


if __name__ == "__main__":
    main()
