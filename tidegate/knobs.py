"""The knobs: what an operator may change while training runs, with their bounds and their one parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from tidegate.errors import KnobError

Auto = Literal["auto"]
Off = Literal["off"]
Stride = float | Auto | Off
KnobValue = float | str

AUTO: Final = "auto"
OFF: Final = "off"


@dataclass(frozen=True, kw_only=True)
class KnobSpec:
    """What one knob accepts. `words` are the values that are not numbers."""

    name: str
    minimum: float
    maximum: float
    words: tuple[str, ...]
    unit: str
    help: str

    def parse(self, value: object) -> KnobValue:
        """The value as a number or one of `words`; raises KnobError naming value and bound."""
        if isinstance(value, str) and value.strip().lower() in self.words:
            return value.strip().lower()
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = float("nan")
        if isinstance(value, bool) or not self.minimum <= number <= self.maximum:
            raise KnobError(f"{self.name}={value!r} is out of range: {self.bounds}.", self.name)
        return number

    @property
    def bounds(self) -> str:
        numbers = f"a number from {self.minimum:g} to {self.maximum:g}"
        return " or ".join([numbers, *(repr(word) for word in self.words)])


SPECS: Final[dict[str, KnobSpec]] = {
    spec.name: spec
    for spec in (
        KnobSpec(
            name="stride",
            minimum=1.0,
            maximum=1_000_000.0,
            words=(AUTO, OFF),
            unit="subgroups",
            help="Every stride-th subgroup that is not resident is updated on the device: device share = 1/stride.",
        ),
        KnobSpec(
            name="static_ratio",
            minimum=0.0,
            maximum=1.0,
            words=(),
            unit="share of subgroups",
            help="Share of the subgroups whose state stays on the device between updates.",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """One full set of desired knobs. Values outside the bounds raise KnobError at construction."""

    stride: Stride = AUTO
    static_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name, value in self.as_dict().items():
            object.__setattr__(self, name, SPECS[name].parse(value))

    def as_dict(self) -> dict[str, KnobValue]:
        return {name: getattr(self, name) for name in SPECS}

    def changed(self, changes: dict[str, Any]) -> Knobs:
        """These knobs with `changes` applied; an unknown name raises KnobError that lists the known ones."""
        for name in changes:
            spec(name)
        return Knobs(**{**self.as_dict(), **changes})


def spec(name: str) -> KnobSpec:
    """The spec of the knob `name`; an unknown name raises KnobError that lists the known ones."""
    if name not in SPECS:
        raise KnobError(f"There is no knob {name!r}. The knobs are: {', '.join(SPECS)}.", name)
    return SPECS[name]


def device_share(stride: float | Off) -> float:
    """Share of the non-resident subgroups that the device updates (DOS Algorithm 1: 1/stride)."""
    return 0.0 if stride == OFF else 1.0 / float(stride)
