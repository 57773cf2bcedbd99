"""How a figure is written, and whether it is within its bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from reporting.lines import Line, Runs, Value, value

Side = Literal["at least", "above", "at most", "below"]


@dataclass(frozen=True)
class Unit:
    """Figures are multiplied by `factor` and written with `digits` decimals and a name."""

    factor: float = 1.0
    digits: int = 2
    name: str = ""

    def number(self, figure: float) -> str:
        return f"{figure * self.factor:,.{self.digits}f}"

    def show(self, found: Value | None) -> str:
        """The median with its unit, and its spread in brackets."""
        if found is None:
            return "not measured"
        text = f"{self.number(found.middle)}{self.name}"
        if found.low is None or found.high is None:
            return text
        return f"{text} ({self.number(found.low)} to {self.number(found.high)})"


RATIO: Final = Unit()
THOUSANDTHS: Final = Unit(digits=3)
COUNT: Final = Unit(digits=0)
PERCENT: Final = Unit(100, 1, " %")
FINE_PERCENT: Final = Unit(100, 2, " %")
SECONDS: Final = Unit(name=" s")
MILLISECONDS: Final = Unit(1000, 0, " ms")
UNSCALED_MILLISECONDS: Final = Unit(digits=1, name=" ms")
"""For figures that a line already has in milliseconds."""


@dataclass(frozen=True)
class Bound:
    """What a claim promises of a figure."""

    side: Side
    limit: float

    def holds(self, figure: float) -> bool:
        if self.side == "at least":
            return figure >= self.limit
        if self.side == "above":
            return figure > self.limit
        return figure <= self.limit if self.side == "at most" else figure < self.limit


@dataclass(frozen=True)
class Figure:
    """One column of a table. path: where it is in a line. goal: more than the bound, which a run need not reach."""

    name: str
    path: str
    unit: Unit = RATIO
    bound: Bound | None = None
    goal: Bound | None = None

    def cell(self, line: Line) -> str:
        text = self.unit.show(value(line, self.path))
        return f"**{text}, missed**" if self.misses(line) else text

    def promise(self, bound: Bound | None) -> str:
        """A bound as the table has it."""
        return f"{bound.side} {self.unit.number(bound.limit)}{self.unit.name}" if bound else ""

    def misses(self, line: Line) -> bool:
        return self._missed(line, self.bound) is not None

    def unmeasured(self, line: Line) -> bool:
        return value(line, self.path) is None

    def said(self, line: Line, word: str, bound: Bound | None) -> str | None:
        """How a line misses a bound, or None. word: what the sentence calls the bound."""
        found = self._missed(line, bound)
        if found is None or bound is None:
            return None
        shown = f"{self.unit.number(found.middle)}{self.unit.name}"
        reached = any(end is not None and bound.holds(end) for end in (found.low, found.high))
        spread = f" Its spread reaches the {word}." if reached else ""
        return f"**“{self.name}” is {shown}: the {word} is {self.promise(bound)}.**{spread}"

    def _missed(self, line: Line, bound: Bound | None) -> Value | None:
        found = value(line, self.path)
        return None if bound is None or found is None or bound.holds(found.middle) else found


def table(figures: Sequence[Figure], found: Sequence[Runs], device: Callable[[Line], str]) -> str:
    """The bounds, then one row for each hardware, with the figures of its newest run."""
    heads = ["hardware", "emulated or real", "committed runs", *(figure.name for figure in figures)]
    promised = [
        [f"*{word}*", "", "", *(figure.promise(getattr(figure, word)) for figure in figures)]
        for word in ("bound", "goal")
        if any(getattr(figure, word) for figure in figures)
    ]
    rows = [
        [one.label, device(one.newest), str(len(one.lines)), *(figure.cell(one.newest) for figure in figures)]
        for one in found
    ]
    return markdown_table(heads, [*promised, *rows])


def markdown_table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def status(figures: Sequence[Figure], runs: Runs) -> str:
    """The newest run in a few words."""
    missed = []
    for word in ("bound", "goal"):
        promised = [(figure, bound) for figure in figures if (bound := getattr(figure, word))]
        count = sum(figure.said(runs.newest, word, bound) is not None for figure, bound in promised)
        if count:
            missed.append(f"**misses {count} of {len(promised)} {word}s**")
        elif word == "bound":
            measured = not any(figure.unmeasured(runs.newest) for figure, _ in promised)
            missed.append("within all bounds" if measured else "within all bounds that were measured")
    return f"{runs.label}: {', '.join(missed)}"


def verdicts(figures: Sequence[Figure], found: Sequence[Runs]) -> str:
    """One line for each hardware: which bounds and goals its newest run misses, and how many of its runs miss a
    bound."""
    return "\n".join(f"- {one.label}: {_verdict(figures, one)}" for one in found)


def _verdict(figures: Sequence[Figure], runs: Runs) -> str:
    bounds = [text for one in figures if (text := one.said(runs.newest, "bound", one.bound))]
    goals = [text for one in figures if (text := one.said(runs.newest, "goal", one.goal))]
    missed = sum(any(figure.misses(line) for figure in figures) for line in runs.lines)
    count = len(runs.lines)
    said = ["The newest run is within all bounds."]
    if bounds:
        said = [f"The newest run misses {len(bounds)} bound{'s' if len(bounds) > 1 else ''}.", *bounds]
    elif not missed and count > 1:
        said = [f"All {count} committed runs are within all bounds."]
    if missed and count > 1:
        said.append(f"{missed} of {count} committed runs miss{'es' if missed == 1 else ''} a bound.")
    unmeasured = [f"“{one.name}” was not measured." for one in figures if one.bound and one.unmeasured(runs.newest)]
    return " ".join([*said, *unmeasured, *goals])
