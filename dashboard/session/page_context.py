"""Where the viewer is: which daemon, run and rank a page is about, and how often its live parts are drawn anew."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, ParamSpec

import streamlit as st

from tidegate.dashboard.style import markup, palette

log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 1.5
SLOW_SECONDS: Final = 4.5
"""For what changes seldom, and for charts below the first screen: each of them takes a browser 40 ms."""
_P = ParamSpec("_P")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a page is asked to show. The address of the page says it: `/run?run=llama-7b&rank=3`."""

    url: str
    """Of the daemon."""
    run: str = ""
    """Empty on pages that are about no run in particular, unless the address names one."""
    rank: int = 0


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What goes wrong inside is a sentence on the page; the log has the rest."""
    try:
        yield
    except Exception as error:
        log.exception("a part of a page could not be drawn")
        sentence = (
            f"This part of the page could not be drawn ({type(error).__name__}); the log of the live view says why. "
            "It tries again by itself."
        )
        st.html(markup.banner(sentence, palette.LIVENESS["lost"]))


def live(draw: Callable[_P, None]) -> Callable[_P, None]:
    """Decorator of what refreshes by itself. Whatever takes input that a refresh must not eat stays outside of it."""
    return _every(REFRESH_SECONDS, draw)


def slow(draw: Callable[_P, None]) -> Callable[_P, None]:
    """The same, for what is looked at less."""
    return _every(SLOW_SECONDS, draw)


def _every(seconds: float, draw: Callable[_P, None]) -> Callable[_P, None]:
    @st.fragment(run_every=seconds)
    @functools.wraps(draw)
    def drawn(*args: _P.args, **more: _P.kwargs) -> None:
        with told():
            draw(*args, **more)

    return drawn
