"""Links between pages, the query of the page's address, and values of fields. Following a link keeps Streamlit's
session, and with it the viewer's token and edits."""

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


def remember(query: Mapping[str, str | None]) -> None:
    """Writes these values into the query of the page's address, so that the link can be shared. A value of None removes
    its name from the query."""
    for name, value in query.items():
        if value is None:
            st.query_params.pop(name, None)
        elif st.query_params.get(name) != value:
            st.query_params[name] = value


def field_key(key: str, value: object) -> str:
    """Returns `key`, the session key of a field. If the session has no value for it, stores `value` there: Streamlit
    drops the values of fields when the viewer leaves their page."""
    st.session_state.setdefault(key, value)
    return key


def _texts(query: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(value) for name, value in query.items()}
