"""Converts Mermaid flowcharts to SVG inside the page, so that the browser loads no script from another host.

It knows what `docs/draw_architecture.py` writes: nodes with a label, and arrows. The layer of a node is
the length of the longest path to it. An arrow that crosses a layer gets an empty place in that layer.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any, Final

NODE: Final = re.compile(r'^\s*(\w+)\["(.+)"\]$', re.MULTILINE)
ARROW: Final = re.compile(r"^\s*(\w+) --> (\w+)$", re.MULTILINE)
HEIGHT: Final = 26.0
BETWEEN: Final = 62.0
SWEEPS: Final = 12

Edges = list[tuple[str, str]]
Layers = list[list[str]]


def as_html(source: str, language: str, css_class: str, options: Any, md: Any, **_: object) -> str:
    """What `pymdownx.superfences` calls for a block of Mermaid."""
    return f'<div class="{css_class}">{flowchart(source)}</div>'


def flowchart(source: str) -> str:
    """The SVG of one flowchart."""
    labels = dict(NODE.findall(source))
    edges: Edges = ARROW.findall(source)
    layers, short = layered(list(labels), edges)
    order(layers, short)
    widths = {name: 16 + 7.4 * len(label) for name, label in labels.items()}
    width = max(sum(widths.get(name, 10) + 14 for name in layer) for layer in layers)
    place: dict[str, tuple[float, float]] = {}
    for depth, layer in enumerate(layers):
        room = sum(widths.get(name, 10) for name in layer)
        gap = (width - room) / (len(layer) + 1)
        x = gap
        for name in layer:
            place[name] = (x + widths.get(name, 10) / 2, 4 + depth * BETWEEN)
            x += widths.get(name, 10) + gap
    height = 8 + HEIGHT + BETWEEN * (len(layers) - 1)
    parts = [_curve(place[start], place[end], end in labels, start in labels) for start, end in short]
    parts += [_box(*place[name], widths[name], label) for name, label in labels.items()]
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" font-size="12.5" role="img" '
        f'aria-label="Flowchart">{"".join(parts)}</svg>'
    )


def layered(names: list[str], edges: Edges) -> tuple[Layers, Edges]:
    """The nodes of each layer, and arrows between neighbouring layers. A longer arrow is split: each layer that it
    crosses gets a dummy node."""
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for start, end in edges:
            depth[end] = max(depth[end], depth[start] + 1)
    layers: Layers = [[name for name in names if depth[name] == row] for row in range(max(depth.values()) + 1)]
    short: Edges = []
    for start, end in edges:
        before = start
        for row in range(depth[start] + 1, depth[end]):
            passing = f"{start} {end} {row}"
            layers[row].append(passing)
            short.append((before, passing))
            before = passing
        short.append((before, end))
    return layers, short


def order(layers: Layers, short: Edges) -> None:
    """Sorts each layer by the middle of its neighbours, down and up in turns, so that few arrows cross."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in range(1, len(layers)) if down else range(len(layers) - 2, -1, -1):
            other = layers[row - 1 if down else row + 1]
            near = {name: (place + 0.5) / len(other) for place, name in enumerate(other)}
            pairs = short if down else [(end, start) for start, end in short]
            sums: dict[str, list[float]] = {}
            for start, end in pairs:
                if start in near:
                    sums.setdefault(end, []).append(near[start])
            now = {name: (place + 0.5) / len(layers[row]) for place, name in enumerate(layers[row])}
            middle = {name: sum(sums[name]) / len(sums[name]) if name in sums else now[name] for name in layers[row]}
            layers[row].sort(key=lambda name: middle[name])


def _curve(start: tuple[float, float], end: tuple[float, float], has_head: bool, from_box: bool) -> str:
    (x1, y1), (x2, y2) = start, end
    y1 += HEIGHT if from_box else HEIGHT / 2
    y2 += -4 if has_head else HEIGHT / 2
    half = (y1 + y2) / 2
    path = f'<path d="M{x1:.1f} {y1:.1f}C{x1:.1f} {half:.1f} {x2:.1f} {half:.1f} {x2:.1f} {y2:.1f}" fill="none" '
    path += 'stroke="currentColor" stroke-opacity="0.45"/>'
    if not has_head:
        return path
    return path + f'<path d="M{x2 - 4:.1f} {y2 - 3:.1f}h8l-4 7z" fill="currentColor" fill-opacity="0.6"/>'


def _box(x: float, y: float, width: float, label: str) -> str:
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT:g}" rx="4" '
        'fill="#0072B2" fill-opacity="0.12" stroke="currentColor" stroke-opacity="0.5"/>'
        f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle" fill="currentColor">{escape(label)}</text>'
    )
