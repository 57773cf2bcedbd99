"""Charts and tables of the link, memory, CPU, loss, gradient norm and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

from tidegate import units
from tidegate.client.step_stats import WINDOW, StepSummary, column, tokens_per_second
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.figures import charts
from tidegate.dashboard.figures.memory_chart import memory_figure
from tidegate.dashboard.style import markup, palette
from tidegate.dashboard.widgets.figure import draw
from tidegate.wire.step import StepReport, moved_by

MIN_CEILING_BYTES = 1 << 20
"""Fewest bytes that a phase must have transferred to count for the link's highest speed. The speed of smaller transfers
says little."""


def links(snapshot: Snapshot) -> None:
    st.html(markup.title("Link", "bytes a step, by direction and content"))
    draw(charts.link_bytes(snapshot.steps), "link_bytes")


def link_speeds(snapshot: Snapshot, figures: StepSummary) -> None:
    """Draws bytes and busy time of each direction in each phase, and the speed as a share of the highest speed."""
    ceilings = link_ceilings(snapshot.steps)
    st.html(
        markup.title(
            "Link, by phase",
            f"means of {figures.step_count_text}, against the fastest phase of {len(snapshot.steps)}",
        )
    )
    rows = []
    for (direction, phase), (moved, busy) in _by_phase(snapshot.steps[-WINDOW:]).items():
        color = palette.LANE.get(direction, palette.GREY)
        rows.append(
            (
                markup.dot(direction, color),
                markup.dot(phase, palette.PHASE.get(phase, palette.GREY)),
                units.nbytes(moved),
                units.seconds(busy),
                against(moved / busy if busy > 0 else None, ceilings.get(direction), color),
            )
        )
    st.html(markup.table(("direction", "phase", "bytes", "busy", "of its ceiling, while busy"), rows, left=(0, 1)))


def against(speed: float | None, ceiling: float | None, color: str) -> str:
    """A bar, as HTML, for a speed (bytes per second) as a share of `ceiling`; only the speed as text if one of them is
    unknown."""
    if speed is None or not ceiling:
        return units.rate(speed)
    share = speed / ceiling
    return markup.bar(share, f"{units.share(share)}, {units.rate(speed)}", color)


def link_ceilings(steps: Sequence[StepReport]) -> dict[str, float]:
    """The highest mean speed of each direction in any phase of these steps that moved at least MIN_CEILING_BYTES."""
    ceilings: dict[str, float] = {}
    for step in steps:
        for (direction, _), (moved, busy) in _by_phase((step,)).items():
            if moved >= MIN_CEILING_BYTES and busy > 0:
                ceilings[direction] = max(ceilings.get(direction, 0.0), moved / busy)
    return ceilings


def _by_phase(steps: tuple[StepReport, ...]) -> dict[tuple[str, str], tuple[float, float]]:
    totals = moved_by((row for step in steps for row in step.links), lambda row: (row.direction, row.phase))
    return {
        name: (moved / len(steps), busy / len(steps)) for name, (moved, busy) in sorted(totals.items(), reverse=True)
    }


def memory(snapshot: Snapshot) -> None:
    """Draws the memory chart of the newest steps: peaks of device memory by phase above, the engine's host memory
    below."""
    words = "above: peak on the device in each phase; below: what the engine holds in host memory"
    st.html(markup.title("Memory", words))
    draw(memory_figure(snapshot.steps, snapshot.rank.device_memory_bytes), "memory")


def cpu(snapshot: Snapshot) -> None:
    st.html(markup.title("CPU, by phase", "cores busy"))
    draw(charts.cpu_cores(snapshot.steps), "cpu")


def loss(snapshot: Snapshot) -> None:
    st.html(markup.title("Loss"))
    _curve("loss", snapshot, lambda step: step.loss, "No loss: call optimizer.log(loss=…).", palette.PHASE["backward"])


def grad_norm(snapshot: Snapshot) -> None:
    st.html(markup.title("Gradient norm", "before clipping"))
    _curve("grad_norm", snapshot, lambda step: step.grad_norm, "No gradient norm was reported.", palette.LANE["cpu"])


def tokens(snapshot: Snapshot) -> None:
    st.html(markup.title("Tokens", "per second, step by step"))
    _curve(
        "tokens",
        snapshot,
        lambda step: tokens_per_second([step]),
        "No tokens: call optimizer.log(tokens=…).",
        palette.PHASE["update"],
    )


def _curve(key: str, snapshot: Snapshot, pick: Callable[[StepReport], float | None], nothing: str, color: str) -> None:
    """Draws the values that `pick` returns for the steps; the text `nothing` if there are none."""
    draw(charts.series(column(snapshot.steps, pick), nothing, color), key)
