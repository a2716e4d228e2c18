"""The page of an experiment of the paper: what it claims, what was found, the figure, how it was made."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpfs.markup import tag, together
from lpfs.report import words
from lpfs.report.made import facts
from lpfs.report.page import page
from lpfs.report.parts import card, copyable, folded, table, tile, word


def reproduced_page(values: Mapping[str, Any], title: str, picture: Path) -> str:
    """Return the page of what ``reproduce`` wrote: its JSON, and its figure, which goes into the page."""
    name, data = values["experiment"], values["data"]
    shown = base64.b64encode(picture.read_bytes()).decode()
    tiles = [
        tile("Data", data["kind"], data["said"].partition(": ")[2]),
        tile("Size", "full" if values["full"] else "small", words.duration(values["seconds"])),
        tile("Seed", values["seed"], f"{values['settings']['seeds']} in all"),
    ]
    rows = [[word(tag("bdi", each)) for each in row] for row in values["table"]]
    more = json.dumps(values["ours"], indent=1, ensure_ascii=False)
    body = together(
        tag(
            "div",
            tag("h1", title),
            tag("p", f"The paper: {values['claim']}", class_="lead"),
            tag("dl", *tiles, class_="tiles"),
            class_="hero",
        ),
        card("Beside the paper", table(["", "The paper", "Here"], rows)),
        card("Figure", tag("img", src=f"data:image/png;base64,{shown}", alt=name, class_="figure")),
        card(
            "How it was made",
            copyable(values["command"], "command"),
            facts({**values, "fingerprint": data.get("fingerprint")}, ""),
            folded("Settings", copyable(json.dumps(values["settings"], indent=1), "settings")),
            folded("All numbers", copyable(more, "numbers")),
        ),
    )
    return page(f"{name} – the LPFS paper", f"The LPFS paper · {name}", body, {}, pictures=True)
