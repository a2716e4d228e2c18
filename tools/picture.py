"""Take the picture of a report: what Chromium shows of it, as a PNG of few colours.

    lpfs select census_income_kdd.parquet --label label --split split --out run
    python tools/picture.py run/report.html docs/images/report.png --from 0 --to 920
    sed "s/<details/<details open/" run/report.html > open.html  # its closed sections
    python tools/picture.py open.html docs/images/charts.png --from 4125 --to 5160

It needs ``chromium`` (apt-get install chromium) and Pillow, which comes with matplotlib.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COLOURS = 128
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from", dest="first", type=int, default=0, help="where the picture begins on the page")
    parser.add_argument("--to", dest="last", type=int, default=1000, help="where it ends")
    parser.add_argument("--width", type=int, default=1240, help="of the page")
    parser.add_argument("--scale", type=float, default=1.5, help="pixels of the picture for one of the page")
    given = parser.parse_args()
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit("there is no chromium here; install: apt-get install chromium")
    take(program, given.page, given.picture, f"{given.width},{given.last}", given.scale)
    cut(given.picture, round(given.first * given.scale))
    print(f"{given.picture}: {given.picture.stat().st_size / 1000:.0f} kB")


def take(program: str, page: Path, picture: Path, size: str, scale: float) -> None:
    """Let the browser draw the page, light, and write what it shows."""
    with tempfile.TemporaryDirectory(prefix="lpfs-") as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        options += [f"--window-size={size}", f"--force-device-scale-factor={scale}", f"--user-data-dir={profile}"]
        command = [program, *options, f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def cut(picture: Path, top: int) -> None:
    """Write the picture again from a row of it on, with a palette: a third of the bytes, and it looks the same."""
    from PIL import Image

    with Image.open(picture) as full:
        part = full.convert("RGB").crop((0, top, full.width, full.height))
    part.quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    main()
