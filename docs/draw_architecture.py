"""Draws the rooms of Tidegate and their imports into `docs/architecture.md`, from the import graph of the code.

`python -m docs.draw_architecture` writes the drawings between their markers; with `--check` it fails where they are not
what the code gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grimp

from docs.generated import filled, run

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "architecture.md"
PARTS: Final = ("agent", "daemon", "dashboard", "grafana", "kernels")
"""Folders at the top of the repository; all other rooms are in `tidegate/`."""
ROOMS_OF: Final = ("tidegate", "tidegate.agent", "tidegate.daemon", "tidegate.dashboard")
"""The packages whose rooms are drawn."""

Edges = set[tuple[str, str]]
"""(room that imports, room that is imported)."""


def drawings() -> dict[str, str]:
    """The drawing of each package in `ROOMS_OF`, as a block of Mermaid."""
    graph = grimp.build_graph("tidegate", exclude_type_checking_imports=True, cache_dir=None)
    return {package: _mermaid(package, *rooms_and_imports(graph, package)) for package in ROOMS_OF}


def rooms_and_imports(graph: grimp.ImportGraph, package: str) -> tuple[set[str], Edges]:
    """The rooms of `package` and which of them import which. `tidegate.__main__` is no room."""
    rooms = {name.rpartition(".")[2] for name in graph.find_children(package)} - {"__main__"}
    edges: Edges = set()
    for room in rooms:
        inside = f"{package}.{room}"
        for module in {inside, *graph.find_descendants(inside)}:
            for imported in graph.find_modules_directly_imported_by(module):
                other = imported.removeprefix(f"{package}.").partition(".")[0]
                if imported.startswith(f"{package}.") and other != room:
                    edges.add((room, other))
    return rooms, edges


def shortest(edges: Edges) -> Edges:
    """Without those imports that a longer way says: of a → b → c and a → c the last one goes."""
    return {
        (start, end)
        for start, end in edges
        if not any(end in _reached(edges, middle) for first, middle in edges if first == start and middle != end)
    }


def _reached(edges: Edges, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        room = waiting.pop()
        news = {end for first, end in edges if first == room} - found
        found |= news
        waiting += news
    return found


def _mermaid(package: str, rooms: Iterable[str], edges: Edges) -> str:
    lines = [f'  {room}["{_label(package, room)}"]' for room in sorted(rooms)]
    lines += [f"  {start} --> {end}" for start, end in sorted(shortest(edges))]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def _label(package: str, room: str) -> str:
    """A room of the core with its folder, for rooms of the parts are drawn apart."""
    here = ROOT.joinpath(*package.split("."), room)
    name = f"{room}/" if here.is_dir() else f"{room}.py"
    return f"tidegate/{name}" if package == "tidegate" and room not in PARTS else name


def redrawn(page: str) -> str:
    """The page with the drawings as they should be. ValueError where it has no place for one."""
    return filled(page, {f"drawing of {package}": drawing for package, drawing in drawings().items()})


def main(arguments: list[str]) -> int:
    return run("docs.draw_architecture", lambda: {PAGE: redrawn(PAGE.read_text())}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
