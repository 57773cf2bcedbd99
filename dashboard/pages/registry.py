"""Registry of the pages: address, title, scope (all runs, a run, a rank) and drawing function of each page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from tidegate.dashboard.pages import alerts, now, plan, run, timeline, tune
from tidegate.dashboard.session.page_context import PageContext

About = Literal["all", "run", "rank"]


@dataclass(frozen=True, kw_only=True)
class Screen:
    """One page, at the address `/<path>`.

    about: `all`: the page is always drawn, even without a run or a daemon. `run`: the page has a picker of runs, and is
        drawn only if there is a run. `rank`: the page also has a picker of ranks.
    """

    path: str
    title: str
    about: About
    draw: Callable[[PageContext], None]


SCREENS: Final = (
    Screen(path="now", title="Now", about="all", draw=now.now),
    Screen(path="run", title="Run", about="rank", draw=run.run),
    Screen(path="timeline", title="Timeline", about="rank", draw=timeline.timeline),
    Screen(path="tune", title="Tune", about="run", draw=tune.tune),
    Screen(path="plan", title="Plan", about="all", draw=plan.plan),
    Screen(path="alerts", title="Alerts and audit", about="run", draw=alerts.alerts),
)
"""The pages in the order of the navigation bar; the first is the start page."""
