"""Links, memory and what training makes."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard import charts, markup, palette, units
from tidegate.dashboard.digest import WINDOW, Digest, column, tokens_per_second
from tidegate.dashboard.feed import Snapshot
from tidegate.dashboard.parts.phases import CONFIG
from tidegate.wire import StepReport


def links(snapshot: Snapshot) -> None:
    st.html(markup.title("Link", "bytes a step, by direction and content"))
    st.plotly_chart(charts.link_bytes(snapshot.steps), key="link_bytes", config=CONFIG)


def link_speeds(snapshot: Snapshot, figures: Digest) -> None:
    """Busy time and speed of each direction in each phase."""
    st.html(markup.title("Link, by phase", f"means of {figures.steps} steps"))
    rows = [
        (
            markup.dot(direction, palette.LANE.get(direction, palette.GREY)),
            markup.dot(phase, palette.PHASE.get(phase, palette.GREY)),
            units.nbytes(moved),
            units.seconds(busy),
            units.rate(moved / busy if busy > 0 else None),
        )
        for (direction, phase), (moved, busy) in _by_phase(snapshot.steps[-WINDOW:]).items()
    ]
    st.html(markup.table(("direction", "phase", "bytes", "busy", "while busy"), rows, left=(0, 1)))


def _by_phase(steps: tuple[StepReport, ...]) -> dict[tuple[str, str], tuple[float, float]]:
    totals: dict[tuple[str, str], tuple[float, float]] = {}
    for row in (row for step in steps for row in step.links):
        moved, busy = totals.get((row.direction, row.phase), (0.0, 0.0))
        totals[row.direction, row.phase] = (moved + row.bytes / len(steps), busy + row.busy_seconds / len(steps))
    return dict(sorted(totals.items(), reverse=True))


def memory(snapshot: Snapshot) -> None:
    st.html(markup.title("Memory", "device peak by phase, host held by the engine"))
    st.plotly_chart(charts.memory(snapshot.steps), key="memory", config=CONFIG)


def loss(snapshot: Snapshot) -> None:
    st.html(markup.title("Loss"))
    points = column(snapshot.steps, lambda step: step.loss)
    figure = charts.series(points, "loss", "No loss: call optimizer.log(loss=…).", palette.PHASE["backward"])
    st.plotly_chart(figure, key="loss", config=CONFIG)


def grad_norm(snapshot: Snapshot) -> None:
    st.html(markup.title("Gradient norm", "before clipping"))
    points = column(snapshot.steps, lambda step: step.grad_norm)
    figure = charts.series(points, "norm", "No gradient norm was reported.", palette.LANE["cpu"])
    st.plotly_chart(figure, key="grad_norm", config=CONFIG)


def tokens(snapshot: Snapshot) -> None:
    st.html(markup.title("Tokens", "per second, step by step"))
    points = column(snapshot.steps, lambda step: tokens_per_second([step]))
    figure = charts.series(points, "tokens/s", "No tokens: call optimizer.log(tokens=…).", palette.PHASE["update"])
    st.plotly_chart(figure, key="tokens", config=CONFIG)
