"""Reads the files of bench/results, and finds figures in their lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Line = Mapping[str, Any]
"""The result of one run: one line of a file."""

SPREADS: Final = (("quartile_low", "quartile_high"), ("quartile_1", "quartile_3"), ("low", "high"), ("least", "most"))
_NAMES: Final = {"amd": "AMD", "epyc": "EPYC", "nvidia": "NVIDIA"}


@dataclass(frozen=True)
class Value:
    """A figure, and the ends of its spread where a line has them."""

    middle: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Runs:
    """The committed runs of one kind on one kind of hardware, the oldest first. label: the hardware, and the kind of
    run if a file has several."""

    label: str
    file: Path
    lines: tuple[Line, ...]

    @property
    def newest(self) -> Line:
        return self.lines[-1]


def runs_of(results: Path, prefix: str, kind: Callable[[Line], str | None]) -> list[Runs]:
    """The runs in the files `PREFIX-HARDWARE.jsonl`. kind: returns the kind of run of a line, which the
    label has after the hardware; None leaves the line out."""
    found = []
    for file in sorted(results.glob(f"{prefix}-*.jsonl")):
        by_kind: dict[str, list[Line]] = {}
        for text in file.read_text().splitlines():
            line = json.loads(text)
            name = kind(line)
            if name is not None:
                by_kind.setdefault(name, []).append(line)
        where = hardware(file.stem.removeprefix(f"{prefix}-"))
        found += [Runs(f"{where}, {name}" if name else where, file, tuple(by_kind[name])) for name in sorted(by_kind)]
    return found


def hardware(name: str) -> str:
    """The name of hardware as readers know it: `amd-epyc-2-cores` is "AMD EPYC, 2 cores"."""
    words = name.removeprefix("emulated-").split("-")
    shown = [_NAMES.get(word) or (word.upper() if any(c.isdigit() for c in word) else word.title()) for word in words]
    if words[-1] == "cores":
        return f"{' '.join(shown[:-2])}, {words[-2]} cores"
    return " ".join(shown)


def value(line: Line, path: str) -> Value | None:
    """The figure at a path of keys with dots between them. A spread is in the figure itself, or in keys beside it."""
    *parents, last = path.split(".")
    place: Any = line
    for key in parents:
        place = place.get(key) if isinstance(place, Mapping) else None
    found = place.get(last) if isinstance(place, Mapping) else None
    if found is None:
        return None
    if isinstance(found, Mapping):
        return of_spread(found)
    return Value(found, place.get(f"{last}_low"), place.get(f"{last}_high"))


def of_spread(found: Mapping[str, float]) -> Value:
    """The median and the ends of its spread, whatever a bench calls them."""
    low, high = next(((low, high) for low, high in SPREADS if low in found), ("", ""))
    return Value(found["median"], found.get(low), found.get(high))


def of_quartiles(quartiles: Sequence[float]) -> Value:
    """The median of a list of three: quartile, median, quartile."""
    low, middle, high = quartiles
    return Value(middle, low, high)
