"""Griffe extension that turns the parameter lines `name: description` of a docstring into a Markdown list.

mkdocstrings loads this file as an extension of Griffe.
"""

from __future__ import annotations

import re
from typing import Any, Final

from griffe import Extension, Object

PARAMETERS: Final = re.compile(r"((?:\*{0,2}[a-z_]\w*)(?:, \*{0,2}[a-z_]\w*)*): (?=\S)")


class ParameterLists(Extension):
    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(docstring: str) -> str:
    """The docstring in Markdown, in which such paragraphs are lists."""
    return "\n\n".join(_listed(paragraph) for paragraph in docstring.split("\n\n"))


def _listed(paragraph: str) -> str:
    if not PARAMETERS.match(paragraph):
        return paragraph
    lines = []
    for line in paragraph.splitlines():
        found = PARAMETERS.match(line)
        lines.append(f"- **{found[1]}**: {line[found.end() :]}" if found else f"    {line.strip()}")
    return "\n".join(lines)
