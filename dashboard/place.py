"""Where the viewer is: which daemon, run and rank a page is about, and how often its live parts are drawn anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import streamlit as st

REFRESH_SECONDS: Final = 1.5

live = st.fragment(run_every=REFRESH_SECONDS)
"""Decorator of what refreshes by itself. Whatever takes input that a refresh must not eat stays outside of it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a page is asked to show. The address of the page says it: `/run?run=llama-7b&rank=3`."""

    url: str
    """Of the daemon."""
    run: str = ""
    """Empty on pages that are about no run in particular, unless the address names one."""
    rank: int = 0
