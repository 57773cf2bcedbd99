"""Links between pages. Following a link keeps Streamlit's session, and with it the viewer's token and edits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import streamlit as st

from tidegate.dashboard.style import markup

_PAGES: Final = "pages"


def register_pages(pages: Mapping[str, Any]) -> None:
    """Stores Streamlit's page objects, by path, in this session: `page_link` and `go_to` find the pages there."""
    st.session_state[_PAGES] = pages


def page_link(path: str, label: str, **query: str | int) -> None:
    """Draws a link to the page at `path`, with the label as plain text; it can also be opened in another tab."""
    st.page_link(st.session_state[_PAGES][path], label=markup.plain(label), query_params=_texts(query))


def go_to(path: str, **query: str | int) -> NoReturn:
    """Shows the page at `path` instead of this one."""
    st.switch_page(st.session_state[_PAGES][path], query_params=_texts(query))


def _texts(query: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(value) for name, value in query.items()}
