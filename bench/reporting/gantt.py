"""A Gantt chart of one iteration: one row for its phases, and one for each lane."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from reporting.chart import GRID, INK, LEGEND_ROW, document, legend_rows, line, linear, rect, text

WIDTH: Final = 960
LEFT: Final = 104
RIGHT: Final = 20
ROW: Final = 40
BAR: Final = 28
ROWS: Final = {"phases": "phases", "h2d": "to the GPU", "d2h": "from the GPU", "device": "GPU", "cpu": "CPU"}
"""Lanes and their names, from the top."""
PHASES: Final = {"forward": "#cbd5e1", "backward": "#94a3b8", "update": "#e2e8f0"}
KINDS: Final = {
    "state_h2d": ("state to the GPU", "#93c5fd"),
    "weight_h2d": ("weights to the GPU", "#fde047"),
    "state_d2h": ("state from the GPU", "#fdba74"),
    "grad_d2h": ("gradients from the GPU", "#86efac"),
    "device_update": ("update on the GPU", "#7e22ce"),
    "cpu_update": ("update on the CPU", "#f0abfc"),
    "grad_norm": ("gradient norm", "#67e8f9"),
}
"""Kinds of ops, what the legend calls them, and their colours."""


def gantt(timeline: Mapping[str, Any]) -> str:
    """The chart of a file with `phases` (name, start, end) and `ops` (kind, lane, subgroup, start, end, bytes,
    parameters), in seconds. Bars that are wide enough carry the number of their subgroup."""
    entries = legend_rows([name for name, _ in KINDS.values()], WIDTH - LEFT - RIGHT)
    top = 14 + LEGEND_ROW * len(entries)
    axis = linear("ms since the forward began", [0.0, *(1e3 * end for _, _, end in timeline["phases"])])
    height = top + ROW * len(ROWS) + 58

    def at(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * axis.share(1e3 * seconds)

    def bars() -> Iterator[str]:
        for phase, start, end in timeline["phases"]:
            if phase in PHASES:
                yield from _bar(at(start), at(end), top, PHASES[phase], phase)
        for kind, lane, subgroup, start, end, _, _ in timeline["ops"]:
            if kind in KINDS:
                yield from _bar(at(start), at(end), _row(top, lane), KINDS[kind][1], str(subgroup))

    def frame() -> Iterator[str]:
        bottom = top + ROW * len(ROWS)
        for tick, label in axis.ticks:
            yield line(at(tick / 1e3), top, at(tick / 1e3), bottom, GRID)
            yield text(at(tick / 1e3), bottom + 18, label, "middle")
        for lane, name in ROWS.items():
            yield text(LEFT - 10, _row(top, lane) + BAR / 2 + 4.5, name, "end")
        yield line(LEFT, bottom, WIDTH - RIGHT, bottom, INK)
        yield text((LEFT + WIDTH - RIGHT) / 2, bottom + 44, axis.label, "middle")

    return document(WIDTH, height, [*_legend(entries), *frame(), *bars()])


def _row(top: float, lane: str) -> float:
    return top + ROW * list(ROWS).index(lane)


def _bar(start: float, end: float, y: float, colour: str, label: str) -> Iterator[str]:
    yield rect(start, y + 2, max(end - start, 0.8), BAR, colour)
    if end - start > 8 * len(label) + 4:
        yield text((start + end) / 2, y + 2 + BAR / 2 + 4.5, label, "middle")


def _legend(rows: Sequence[Sequence[tuple[float, str]]]) -> Iterator[str]:
    colours = dict(KINDS.values())
    for row, entries in enumerate(rows):
        for at, name in entries:
            x, y = LEFT + at, 12 + LEGEND_ROW * row
            yield rect(x + 4, y, 16, 14, colours[name])
            yield text(x + 28, y + 12, name)
