"""The page: one file that asks the network for nothing, and whose policy forbids that it could."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import lpfs
from lpfs.markup import Html, embedded, tag, together

SCRIPTS, STYLES = ("uplot.min.js", "report.js"), ("uplot.min.css", "report.css")


def page(title: str, kicker: str, body: Html, charts: Mapping[str, Any], *, pictures: bool = False) -> str:
    """Return the whole document; ``pictures`` allows those that are in it.

    Scripts and styles run by their hash alone: whatever else got into the page would not be executed.
    """
    scripts, styles = [asset(name) for name in SCRIPTS], [asset(name) for name in STYLES]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(hashed, scripts))}",
            f"style-src {' '.join(map(hashed, styles))}",
            *(["img-src data:"] if pictures else []),
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        ]
    )
    head = together(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="generator", content=f"lpfs {lpfs.__version__}"),
        tag("title", title),
        *(Html(f"<style>{each}</style>") for each in styles),
    )
    bar = tag("header", tag("div", tag("span", "lpfs", class_="mark"), tag("span", kicker), class_="wrap"))
    note = tag(
        "noscript", tag("p", "Charts, sorting and search need JavaScript; the tables are complete without.")
    )
    foot = tag("footer", f"Made by lpfs {lpfs.__version__}. This file holds everything it shows.", class_="wrap")
    inside = together(
        *(bar, tag("main", note, body, class_="wrap"), foot),
        embedded("charts", charts),
        *(Html(f"<script>{each}</script>") for each in scripts),
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{inside}</body></html>\n'


@cache
def asset(name: str) -> str:
    """Return a file that is part of every page."""
    return resources.files("lpfs.report").joinpath("assets").joinpath(name).read_text("utf-8").strip()


def hashed(text: str) -> str:
    """Return what allows exactly this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
