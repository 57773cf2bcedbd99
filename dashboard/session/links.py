"""Links between the pages: within the page that is open, so that a viewer's token and edits stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import streamlit as st

from tidegate.dashboard.style import markup

_PAGES: Final = "pages"


def know(pages: Mapping[str, Any]) -> None:
    """Remembers Streamlit's page of each path for this session."""
    st.session_state[_PAGES] = pages


def link(path: str, label: str, **query: str | int) -> None:
    """A link to the page at `path`, drawn here with the label as it is; it may be opened in another tab too."""
    st.page_link(st.session_state[_PAGES][path], label=markup.plain(label), query_params=_texts(query))


def go(path: str, **query: str | int) -> NoReturn:
    """Shows the page at `path` instead of this one."""
    st.switch_page(st.session_state[_PAGES][path], query_params=_texts(query))


def _texts(query: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(value) for name, value in query.items()}
