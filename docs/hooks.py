"""MkDocs hooks of the documentation site: rewrite links to files outside `docs/`, make anchors as GitHub does, draw
Mermaid flowcharts, and refuse pages that load anything from another host.

`mkdocs.yml` names this file. Run MkDocs as `python -m mkdocs` from the root of the repository, as `make docs` does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final

from docs.flowchart import as_html

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent
FOREIGN: Final = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
BLOCK_IN_LIST: Final = re.compile(r"^ {3}```.*?^ {3}```$", re.MULTILINE | re.DOTALL)
"""A block of code in an item of a numbered list: GitHub takes three spaces, Python's Markdown needs four."""
CODE: Final = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
PARAGRAPH_IN_LIST: Final = re.compile(r"(?<=\n\n)(?: {3}(?! )[^\n]*\n)+")
"""A paragraph or a table in an item of a numbered list, likewise."""
NEXT_ITEM: Final = re.compile(r"(\n\n(?: {4}[^\n]*\n)+)(?=\d+\. )")
"""The end of an item with several paragraphs: Python's Markdown needs an empty line before the next one."""
LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    from pymdownx.slugs import slugify

    settings: dict[str, Any] = config.mdx_configs
    settings.setdefault("toc", {})["slugify"] = slugify(case="lower")
    settings.setdefault("pymdownx.superfences", {})["custom_fences"] = [
        {"name": "mermaid", "class": "flowchart", "format": as_html}
    ]
    return config


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    return adapt_lists(rewrite_outside_links(markdown, page.file.src_uri, config.repo_url))


def on_post_page(output: str, *, page: Page, **_: object) -> str:
    if foreign := FOREIGN.search(output):
        raise ValueError(f"{page.file.src_uri} loads something from another host: {foreign[0]}")
    return output


def adapt_lists(markdown: str) -> str:
    """The text of a page whose numbered lists Python's Markdown reads as GitHub does."""
    parts = CODE.split(BLOCK_IN_LIST.sub(lambda block: indent(block[0], " "), markdown))
    parts[::2] = [PARAGRAPH_IN_LIST.sub(lambda text: indent(text[0], " "), part) for part in parts[::2]]
    parts[::2] = [NEXT_ITEM.sub(r"\1\n", part) for part in parts[::2]]
    return "".join(parts)


def rewrite_outside_links(markdown: str, source: str, repo_url: str | None) -> str:
    """The text of a page, without links that lead out of `docs/`.

    Such a link leads to the file in the repository's browser, if `repo_url` is known. Otherwise the file's name stands
    behind the text of the link. `source`: the page's file, below `docs/`.
    """

    def written(match: re.Match[str]) -> str:
        label, target = match.groups()
        name, _, anchor = target.partition("#")
        file = PurePosixPath(os.path.normpath(PurePosixPath("docs", source).parent / name))
        if file.parts[0] == "docs" or not (ROOT / file).exists():
            return match[0]
        if repo_url:
            return f"[{label}]({repo_url.rstrip('/')}/blob/HEAD/{file}{anchor and '#' + anchor})"
        return f"{label} (`{file}`)" if label.strip("`") != str(file) else f"`{file}`"

    return LINK.sub(written, markdown)
