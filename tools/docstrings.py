"""Docstrings as Markdown for the API page: doctests as code, roles as names, formulas as MathML.

An extension of griffe, which mkdocstrings reads the source with (mkdocs.yml).
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> |\s*$).+\n?)*)+", re.MULTILINE)
ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
FORMULA = re.compile(r"^\.\. math::\s*(.+?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
LITERAL = re.compile(r"^((?:\S.*?)?)::\n\n((?:(?: {4}.*)?\n)* {4}.*)", re.MULTILINE)


class PlainDocstrings(griffe.Extension):  # type: ignore[misc]
    """Rewrite every docstring when it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown.

    >>> markdown("Return :class:`~lpfs.Gates`.")
    'Return `Gates`.'
    """
    text = FORMULA.sub(lambda match: _mathml(match[1]), ROLE.sub(r"`\1`", docstring))
    text = DOCTEST.sub(lambda match: _fence(match[0]), text)
    return LITERAL.sub(lambda match: f"{match[1] and match[1] + ':'}\n{_fence(textwrap.dedent(match[2]))}", text)


def _fence(code: str) -> str:
    return f"\n```python\n{code.strip()}\n```\n"


def _mathml(formula: str) -> str:
    from latex2mathml.converter import convert

    return str(convert(" ".join(formula.split()), display="block"))
