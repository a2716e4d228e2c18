"""Hostile column names, and the record of a selection made of any names."""

from __future__ import annotations

import random
from typing import Any

TAGS = [
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=1</script>",
    "<!--<script>",
    "--><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "<svg/onload=window.pwned=1>",
    '"><svg onload=window.pwned=1>',
    "' onmouseover='window.pwned=1",
    '" onfocus="window.pwned=1" autofocus="',
    "<iframe src=javascript:window.parent.pwned=1>",
    "<a href=javascript:window.pwned=1>x</a>",
    "<style>*{display:none}</style>",
    "</td></tr></table><h1>gone</h1>",
    "</title><script>window.pwned=1</script>",
    "</style><script>window.pwned=1</script>",
    "</pre></code><script>window.pwned=1</script>",
    "<base href=https://example.org/>",
    "<meta http-equiv=refresh content=0;url=https://example.org>",
    "<link rel=stylesheet href=https://example.org/x.css>",
    "<template><img src=x onerror=window.pwned=1>",
    "<math><mtext></p><style><img src=x onerror=window.pwned=1>",
    "<noscript><p title='</noscript><img src=x onerror=window.pwned=1>'>",
    "<form action=https://example.org><button>x",
    "<object data=javascript:window.pwned=1>",
    "]]><script>window.pwned=1</script>",
    "${window.pwned=1}",
    "{{constructor.constructor('window.pwned=1')()}}",
    "javascript:window.pwned=1",
    "&lt;script&gt;window.pwned=1&lt;/script&gt;",
    "&#60;img src=x onerror=window.pwned=1&#62;",
    "\\u003cscript\\u003e",
    "\\x3cscript\\x3e",
    "__proto__",
    "constructor",
    "hasOwnProperty",
    "toString",
]
SIGNS = [
    "'",
    '"',
    "`",
    "\\",
    "/",
    "&",
    "<",
    ">",
    ";",
    "--",
    "/*",
    "*/",
    "//",
    "#",
    "%",
    "%00",
    "%s",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
]
FORMULAS = [
    "=1+2",
    "=cmd|' /C calc'!A0",
    "+1",
    "-1",
    "@SUM(1)",
    "\t=1",
    "\r=1",
    '=HYPERLINK("https://example.org")',
    "＝1",
]
PATHS = [
    "../../etc/passwd",
    "..\\..\\x",
    "/etc/passwd",
    "C:\\con",
    "a/b/c",
    ".",
    "..",
    "~",
    "$HOME",
    "`id`",
    "$(id)",
    "a|b",
    "nul",
]
SCRIPTS = [
    "שלום",
    "مرحبا",
    "\u202etxt.exe",
    "\u2066a\u2069",
    "\u200f",
    "a\u0301",
    "日本語",
    "🙂",
    "👩‍👩‍👧",
    "İı",
    "ß",
    "ﷺ",
    "\ufeffbom",
]
HIDDEN = [
    "\x00",
    "a\x00b",
    "\x07",
    "\x1b[31mred",
    "\x7f",
    "\x85",
    "\u2028",
    "\u2029",
    "a\nb",
    "a\r\nb",
    "\ud800",
    "a\udfffb",
    "\ufffe",
    "\x0b",
    " ",
]
LONG = ["x" * 500, "<b>" * 300, "ש" * 400, "long " * 100, "\\" * 300, '"' * 300]


def names(count: int = 200) -> list[str]:
    """Return ``count`` different hostile names."""
    texts = list(dict.fromkeys([*TAGS, *SIGNS, *FORMULAS, *PATHS, *SCRIPTS, *HIDDEN, *LONG]))
    texts += [
        f"{start}{number}{end}"
        for number, (start, end) in enumerate(zip(TAGS * 9, [*SIGNS, *HIDDEN] * 9, strict=False))
    ]
    return list(dict.fromkeys(texts))[:count]


def selection_record(fields: list[str], kept: int | None = None, **sections: Any) -> dict[str, Any]:
    """Return a complete ``selection.json`` that keeps the first fields; ``sections`` replace its parts."""
    kept = len(fields) // 2 if kept is None else kept
    certificate = {"max_logit_change": 0.0, "bound": 0.0, "certified": True, "checked": fields[kept:]}
    metrics = {
        name: {"auc": 0.8 + number / 1000, "logloss": 0.4}
        for number, name in enumerate(("all_fields", "gated", "pruned", "hot_start", "retrained"))
    }
    return {
        "method": "lpfs++",
        "fields": {
            name: {"kind": "categorical", "group": "user", "cardinality": 10 + number, "cost": 1.0}
            for number, name in enumerate(fields)
        },
        "kept": fields[:kept],
        "dropped": fields[kept:],
        "gates": {name: (1.0 - number / 1000 if number < kept else 0.0) for number, name in enumerate(fields)},
        "metrics": metrics,
        "validation": metrics,
        "max_logit_change": 1e-6,
        "certificates": {"zeros": certificate, "cut": {**certificate, "max_logit_change": 1e-7, "bound": 1e-3}},
        "model": "hot_start",
        "chosen_in": {name: int(number < kept) for number, name in enumerate(fields)},
        "savings": {
            "all_fields": {"table_bytes": 1000, "parameters": 2000, "rows_per_second": 10},
            "kept": {"table_bytes": 100, "parameters": 1000, "rows_per_second": 30},
        },
        "seconds": {"pretrain": 1.0, "search": 2.0},
        "seed": 0,
        "configuration": {"source": ["log.csv"], "label": fields[0], "keep": kept, "must_keep": fields[:3], "seeds": 1},
        "splits": {"early": {"rows": 10, "days": ["0", "1"]}, "test": {"rows": 5, "days": ["2", "2"]}},
        "fingerprint": "0123",
        "versions": {"lpfs": "0", "torch": "2"},
        "made": {"curve": [{"alive": 3, "loss": 0.1}, {"alive": 9, "loss": 0.0}], "end": {"allowed": 0.01}},
        "hot_start": {
            "steps": 9,
            "retrain_steps": 90,
            "matched_at": 3,
            "steps_saved": 87,
            "validation": [[0, 0.7], [9, 0.8]],
        },
        **sections,
    }


def search_history(fields: list[str], records: int) -> list[dict[str, Any]]:
    """Return ``Selection.history`` of some fields."""
    rng = random.Random(0)
    return [
        {
            "step": 5 * (row + 1),
            "loss": rng.random(),
            "alive": len(fields) - row % len(fields),
            "penalty": 0.1 / (row + 1),
            "epsilon": 0.1 * 0.9**row,
            "lr": 0.1,
            "gates": [round(rng.random(), 6) for _ in fields],
        }
        for row in range(records)
    ]
