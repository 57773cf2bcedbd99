"""The few elements of SVG from which the drawings of the documentation are made. Colours suit a white ground."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final, Literal

INK: Final = "#1A1A1A"
GREY: Final = "#5B6170"
LINE: Final = "#D5D5D2"
FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"
Anchor = Literal["start", "middle", "end"]


def drawing(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole file. `title` is what a screen reader says."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            rect(0, 0, width, height, "#FFFFFF", radius=6),
            *parts,
            "</svg>\n",
        )
    )


def rect(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 2, stroke: str = "none") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def text(
    x: float, y: float, words: str, *, size: float = 13, anchor: Anchor = "start", fill: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{weight}>'
        f"{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str = LINE, width: float = 1, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
        f'stroke-width="{width:g}"{dashes}/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, *, stroke: str = GREY) -> str:
    """A vertical line with a head at its end."""
    back = 6 if y2 > y1 else -6
    head = f"{x2 - 4:.1f},{y2 - back:.1f} {x2 + 4:.1f},{y2 - back:.1f} {x2:.1f},{y2:.1f}"
    return line(x1, y1, x2, y2 - back, stroke=stroke, width=1.5) + f'<polygon points="{head}" fill="{stroke}"/>'


def badge(x: float, y: float, number: int) -> str:
    """A number in a disc, to which the text below a drawing refers."""
    disc = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="{INK}"/>'
    return disc + text(x, y + 4, str(number), size=12, anchor="middle", fill="#FFFFFF", bold=True)
