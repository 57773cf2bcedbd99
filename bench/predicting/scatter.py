"""Plot of predicted against measured update times, as an SVG. Both axes are logarithmic; exact predictions are on the
diagonal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from predicting.errors import Row

SIDE: Final = 560
MARGIN: Final = 70
BAND: Final = 0.10
"""Half width of the band that is drawn around the diagonal, as a relative error."""
_REAL, _EMULATED, _EQUATION = "#1f6feb", "#d97706", "#9ca3af"


def svg(rows: Sequence[Row]) -> str:
    """The plot as SVG text. Filled circles: the model, in different colours for real and emulated bottlenecks. Hollow
    circles: the papers' equations."""
    axis = _Axis([value for row in rows for value in (row.measured, row.predicted)])
    return "\n".join([*_frame(axis), *_points(axis, rows), *_legend(), "</svg>\n"])


class _Axis:
    """A logarithmic axis, the same for both directions. Its range is extended to the next values of the form 1, 2 or 5
    times a power of 10."""

    def __init__(self, values: Sequence[float]) -> None:
        steps = [factor * 10.0**power for power in range(-6, 4) for factor in (1, 2, 5)]
        low = max((step for step in steps if step <= min(values)), default=steps[0])
        high = min((step for step in steps if step >= max(values)), default=steps[-1])
        self.ticks = [step for step in steps if low <= step <= high]
        self._low, self._span = math.log(low), max(math.log(high / low), 1e-9)

    def at(self, seconds: float) -> float:
        """Distance from the origin of the axis in pixels, limited to the length of the axis."""
        share = (math.log(max(seconds, 1e-12)) - self._low) / self._span
        return min(max(share, 0.0), 1.0) * SIDE

    def x(self, seconds: float) -> float:
        return MARGIN + self.at(seconds)

    def y(self, seconds: float) -> float:
        return MARGIN + SIDE - self.at(seconds)


def _frame(axis: _Axis) -> Iterator[str]:
    size = SIDE + 2 * MARGIN
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="12">'
        f'<rect width="{size}" height="{size}" fill="white"/>'
    )
    low, high = axis.ticks[0], axis.ticks[-1]
    band = [(low, low * (1 + BAND)), (high, high * (1 + BAND)), (high, high * (1 - BAND)), (low, low * (1 - BAND))]
    corners = " ".join(f"{axis.x(x):.1f},{axis.y(y):.1f}" for x, y in band)
    yield f'<polygon points="{corners}" fill="#e5efff"/>'
    yield _line(axis.x(low), axis.y(low), axis.x(high), axis.y(high), "#6b7280")
    for tick in axis.ticks:
        yield _line(axis.x(tick), MARGIN, axis.x(tick), MARGIN + SIDE, "#e5e7eb")
        yield _line(MARGIN, axis.y(tick), MARGIN + SIDE, axis.y(tick), "#e5e7eb")
        label = f"{1e3 * tick:g}"
        yield f'<text x="{axis.x(tick):.1f}" y="{MARGIN + SIDE + 18}" text-anchor="middle">{label}</text>'
        yield f'<text x="{MARGIN - 8}" y="{axis.y(tick) + 4:.1f}" text-anchor="end">{label}</text>'
    middle = MARGIN + SIDE / 2
    yield f'<text x="{middle}" y="{size - 18}" text-anchor="middle">measured update, ms (median; bar: quartiles)</text>'
    yield (
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">'
        f"predicted update, ms (shaded: within {BAND:.0%})</text>"
    )


def _points(axis: _Axis, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        x, y = axis.x(row.measured), axis.y(row.predicted)
        colour = _EMULATED if row.emulated else _REAL
        yield f'<circle cx="{x:.1f}" cy="{axis.y(row.equation):.1f}" r="3" fill="none" stroke="{_EQUATION}"/>'
        yield _line(axis.x(row.low), y, axis.x(row.high), y, colour)
        words = " ".join(f"{name}={value}" for name, value in row.choice.to_dict().items())
        title = f"<title>{words}: {row.error:+.1%}</title>"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{title}</circle>'


def _legend() -> Iterator[str]:
    names = (
        (_REAL, _REAL, "real lanes"),
        (_EMULATED, _EMULATED, "emulated lanes"),
        ("none", _EQUATION, "papers' equations"),
    )
    for place, (fill, stroke, name) in enumerate(names):
        y = MARGIN + 16 + 18 * place
        yield f'<circle cx="{MARGIN + 14}" cy="{y - 4}" r="4" fill="{fill}" stroke="{stroke}"/>'
        yield f'<text x="{MARGIN + 24}" y="{y}">{name}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
