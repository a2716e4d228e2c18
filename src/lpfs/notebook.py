"""HTML of a Selection and an Outcome in a notebook; every name is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lpfs._text import html_environment
from lpfs.report.format import format_measured
from lpfs.schema import Selection

if TYPE_CHECKING:
    from jinja2 import Template

SHOWN_FIELDS = 30  # kept fields in the table; the others are in a closed section
ROW = """
{%- macro row(cells, tag="td") -%}
<tr>
{%- for cell in cells -%}
<{{ tag }} style="border:0;padding:1px 14px 1px 0;text-align:left">{{ cell }}</{{ tag }}>
{%- endfor -%}
</tr>
{%- endmacro -%}
"""
SELECTION = """
{%- macro gate_table(names) -%}
<table style="margin:4px 0">{{ row(["field", "gate"], "th") }}
{%- for name in names -%}
{{ row([name|field_name, "%.3f"|format(gates[name]) if name in gates else "–"]) }}
{%- endfor -%}
</table>
{%- endmacro -%}
{%- macro closed(title) -%}
<details><summary style="cursor:pointer">{{ title }}</summary>{{ caller() }}</details>
{%- endmacro -%}
<div style="line-height:1.5"><div><b>{{ "{:,} of {:,} fields kept".format(kept|length, total) }}</b>
{%- if method %}<span style="opacity:.7"> by {{ method }}</span>{% endif %}</div>{{ gate_table(kept[:shown]) }}
{%- if kept[shown:] -%}
{% call closed("{:,} more kept".format(kept|length - shown)) %}{{ gate_table(kept[shown:]) }}{% endcall %}
{%- endif -%}
{%- if dropped -%}
{% call closed("{:,} dropped".format(dropped|length)) -%}
<div>{% for name in dropped %}{{ name|field_name }}{{ ", " if not loop.last }}{% endfor %}</div>
{%- endcall %}
{%- endif -%}
</div>
"""
OUTCOME = """
{%- if verdict %}<div style="font-weight:bold">{{ verdict }}</div>{% endif %}
{%- for warning in warnings %}<div>Warning: <bdi>{{ warning }}</bdi></div>{% endfor %}
<table style="margin:4px 0">{{ row(["on the test rows", "AUC", "logloss"], "th") }}
{%- for title, auc, logloss in rows %}{{ row([title, auc, logloss]) }}{% endfor -%}
</table>{{ selection }}
<div style="opacity:.7">in <code>{{ folder }}</code>: report.html, selection.json, model/</div>
"""


def selection_html(selection: Selection) -> str:
    """Return a Selection as HTML: the number of kept fields, their gates, and the dropped fields."""
    return _template(SELECTION).render(
        kept=sorted(selection.kept, key=lambda name: -abs(selection.gates.get(name, 0.0))),
        dropped=selection.dropped,
        gates=selection.gates,
        total=len(selection.names),
        method=selection.made.get("method"),
        shown=SHOWN_FIELDS,
    )


def outcome_html(
    selection: Selection,
    metrics: Mapping[str, Mapping[str, Any]],
    titles: Mapping[str, str],
    folder: object,
    record: Mapping[str, Any] | None = None,
) -> str:
    """Return an Outcome as HTML: verdict and warnings of its record, AUC and logloss of its models, the Selection."""
    record, rows = record or {}, []
    for name, model in metrics.items():
        auc, low, high = (model.get(key) for key in ("auc", "auc_low", "auc_high"))
        half_width = None if low is None or high is None else (high - low) / 2
        rows.append([titles.get(name, name), format_measured(auc, half_width), format_measured(model.get("logloss"))])
    return _template(OUTCOME).render(
        verdict=(record.get("verdict") or {}).get("text"),
        warnings=[warning["text"] for warning in record.get("warnings") or ()],
        rows=rows,
        selection=Markup(selection_html(selection)),
        folder=folder,
    )


@cache
def _template(source: str) -> Template:
    return html_environment().from_string(ROW + source)
