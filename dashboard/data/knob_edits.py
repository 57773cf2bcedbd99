"""Rules for editing knobs: checks of typed values, and texts for changes, conflicts and outcomes. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidegate import units
from tidegate.errors import KnobError
from tidegate.knobs.kinds import show_size
from tidegate.knobs.knobs import KnobKind, KnobValue
from tidegate.wire.knobs import GenerationView, KnobBound


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The text typed for each knob, and the generation and knobs that the viewer saw. An empty text means no change of
    the knob."""

    generation: int
    desired: Mapping[str, KnobValue]
    fields: Mapping[str, str]

    def edited(self) -> set[str]:
        """Knobs whose field is not empty."""
        return {name for name, text in self.fields.items() if text.strip()}


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """Parsed values to send, and error texts of invalid values, by knob."""

    changes: dict[str, KnobValue] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def accepted(bound: KnobBound) -> str:
    """The values that a field accepts, as text with unit: `auto, off or 1 to 1 000 000 subgroups`."""
    return f"{limits(bound)} {bound.unit}" if bound.kind == "number" else limits(bound)


def limits(bound: KnobBound) -> str:
    """The values that a field accepts, as text without unit: `auto, off or 1 to 1 000 000`."""
    values: dict[KnobKind, str] = {
        "number": f"{_number(bound.minimum)} to {_number(bound.maximum)}",
        "size": f"{show_size(bound.minimum)} to {show_size(bound.maximum)}",
        "weights": f"weights of {', '.join(bound.paths)}",
        "choice": "",
    }
    return " or ".join(part for part in (", ".join(bound.words), values[bound.kind]) if part)


def example(bound: KnobBound) -> str:
    """An example value, shown in the knob's empty text field."""
    examples: dict[KnobKind, str] = {"size": "12GiB", "weights": ",".join(f"{path}:1" for path in bound.paths)}
    return examples.get(bound.kind, "")


def _number(value: float) -> str:
    return units.integer(int(value)) if value == int(value) else f"{value:g}"


def parse(draft: Draft, bounds: Mapping[str, KnobBound]) -> Parsed:
    """Parses the edited fields within the daemon's bounds; knobs that the run no longer has are left out."""
    parsed = Parsed()
    for name in sorted(draft.edited() & bounds.keys()):
        spec = bounds[name].spec(name)
        try:
            value = spec.parse(draft.fields[name].strip())
        except KnobError as error:
            parsed.errors[name] = str(error)
            continue
        known = draft.desired.get(name)
        if known is None or not spec.same(value, known):
            parsed.changes[name] = value
    return parsed


def describe(changes: Mapping[str, KnobValue], before: Mapping[str, KnobValue] | None = None) -> str:
    """Changes as text: `stride auto → 3, static_ratio = 0.5`."""
    known = before or {}
    parts = [
        f"{name} {units.knob(name, known[name])} → {units.knob(name, value)}"
        if name in known
        else f"{name} = {units.knob(name, value)}"
        for name, value in changes.items()
    ]
    return ", ".join(parts) or "nothing"


def conflict(draft: Draft, generations: Sequence[GenerationView]) -> str:
    """The message of a conflict: what others changed since the viewer began to edit, and what the viewer can do."""
    newer = [view for view in generations if view.generation > draft.generation]
    if not newer:
        return "Conflict: the knobs were changed since you began, so nothing was set. Your edit is kept; set it again."
    last = newer[-1]
    reason = f" (“{last.reason}”)" if last.reason else ""
    others = f" {len(newer)} changes were made since; the newest:" if len(newer) > 1 else ""
    return (
        f"Conflict: someone else was faster, so nothing was set.{others} {last.author} made generation "
        f"{last.generation}, {describe(last.changes, draft.desired)}{reason}; it is {last.state}. Your edit is kept: "
        f"set it again to put it on top of generation {last.generation}, or discard it."
    )


def outcome(view: GenerationView) -> tuple[bool, str]:
    """Whether a generation is proposed, committed or applied (False: it was refused, aborted or superseded), and its
    state as a sentence."""
    what = f"Generation {view.generation} ({describe(view.changes)})"
    match view.state:
        case "applied":
            return True, f"{what} is applied on all ranks."
        case "committed":
            return True, f"{what} is accepted by all ranks; each applies it before its next step."
        case "proposed":
            return True, f"{what} is proposed; the ranks have not all answered yet."
    return False, f"{what} was {view.state}: {view.outcome or 'no reason was given'} The last good knobs stay."
