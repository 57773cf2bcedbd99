"""Context of a page: its daemon, run and rank; decorators for sections that refresh; errors shown on the page."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, ParamSpec

import streamlit as st

from tidegate.dashboard.style import markup

log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 1.5
SLOW_SECONDS: Final = 4.5
"""Seconds between two refreshes of a section that changes seldom, or of the charts in the lower part of a page. These
are refreshed seldom because a browser needs 40 ms to draw one chart."""
_P = ParamSpec("_P")


@dataclass(frozen=True, kw_only=True)
class PageContext:
    """The daemon, run and rank that a page shows. Run and rank are from the query of the page's URL, for example
    `/run?run=llama-7b&rank=3`."""

    url: str
    """The daemon's address."""
    run: str = ""
    """Name of the run. Empty on a page that is not about one run, unless the page's URL names a run."""
    rank: int = 0


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Context manager, and decorator, that shows an exception as a sentence on the page, and logs it."""
    try:
        yield
    except Exception as error:
        log.exception("a part of a page could not be drawn")
        st.html(
            markup.banner(
                f"This part of the page could not be drawn ({type(error).__name__}); the log of the live view says "
                "why. It tries again by itself."
            )
        )


def refreshed(draw: Callable[_P, None]) -> Callable[_P, None]:
    """Decorator for a section that refreshes every `REFRESH_SECONDS`. Do not use it for input fields: a refresh could
    discard their input."""
    return _every(REFRESH_SECONDS, draw)


def refreshed_slowly(draw: Callable[_P, None]) -> Callable[_P, None]:
    """Decorator for a section that refreshes every `SLOW_SECONDS`."""
    return _every(SLOW_SECONDS, draw)


def in_fragment(draw: Callable[_P, None]) -> Callable[_P, None]:
    """Decorator for a section that is drawn again when the viewer uses its input fields, without the rest of the page.
    Use it instead of `st.fragment`."""
    return _in_container(st.fragment(draw))


def _every(seconds: float, draw: Callable[_P, None]) -> Callable[_P, None]:
    return _in_container(st.fragment(run_every=seconds)(errors_shown()(draw)))


def _in_container(fragment: Callable[_P, None]) -> Callable[_P, None]:
    """Draws a fragment in a container of its own, so that the fragment is the only child of its parent.

    Streamlit drops messages of a page that were not sent yet when one of its fragments runs again, although the page
    has ended. The browser then removes the fragment. The following siblings would move up by one place; the next
    message would be for a wrong element, and Streamlit's page would stop for good (`'setIn' cannot be called on an
    ElementNode`).
    """

    @functools.wraps(fragment)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with st.container():
            fragment(*args, **kwargs)

    return drawn
