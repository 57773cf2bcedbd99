"""What a knob may be: a number, a size in bytes, weights of paths, or one of some words. How each is read and shown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Literal, NamedTuple

from tidegate.errors import ConfigError, KnobError

KnobKind = Literal["number", "size", "weights", "choice"]
KnobValue = float | int | str

_PATH_NAME: Final = re.compile(r"[a-z0-9_-]{1,32}")
_RESIDENCES: Final = ("host", "device")
_UNITS: Final = {
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    "b": 1,
}
_SHOWN_UNITS: Final = tuple(
    (f"{letter}{suffix}", base**power)
    for power, letter in reversed(tuple(enumerate("KMGT", start=1)))
    for suffix, base in (("iB", 1024), ("B", 1000))
)
_SIZE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)")


@dataclass(frozen=True, kw_only=True)
class KnobSpec:
    """What one knob accepts. `words` are the values that are accepted beside those of its kind.

    minimum, maximum: bounds of a number, of a size in bytes, of each weight; a choice has none.
    paths: the paths that weights may name; empty while they are not known.
    """

    name: str
    kind: KnobKind = "number"
    minimum: float = 0.0
    maximum: float = 0.0
    words: tuple[str, ...] = ()
    unit: str = ""
    help: str = ""
    paths: tuple[str, ...] = field(default=())

    def parse(self, value: object) -> KnobValue:
        """The value in its one form: a number, whole bytes, weights as text, or one of `words`.

        Raises KnobError naming value and bound.
        """
        if isinstance(value, str) and value.strip().lower() in self.words:
            return value.strip().lower()
        if isinstance(value, bool):
            raise self.out_of_range(value)
        return _KINDS[self.kind].parse(self, value)

    def show(self, value: KnobValue) -> str:
        """The value as people read it; `parse` understands it."""
        return value if isinstance(value, str) else _KINDS[self.kind].show(value)

    def same(self, one: KnobValue, other: KnobValue) -> bool:
        """Whether both ask for the same: weights when their ratios are equal."""
        if self.kind != "weights" or one in self.words or other in self.words:
            return one == other
        return _ratios(weights_of(str(one))) == _ratios(weights_of(str(other)))

    @property
    def bounds(self) -> str:
        """What it accepts, in words."""
        told = _KINDS[self.kind].bounds(self)
        return " or ".join([*([told] if told else []), *(repr(word) for word in self.words)])

    def out_of_range(self, value: object) -> KnobError:
        return KnobError(f"{self.name}={value!r} is out of range: {self.bounds}.", self.name)


def check_path_name(name: str) -> str:
    """The name, if a path may be called so; else ConfigError."""
    if not _PATH_NAME.fullmatch(name) or name in _RESIDENCES:
        raise ConfigError(
            f"A path cannot be called {name!r}: use 1 to 32 of a-z, 0-9, _ and -, and neither 'host' nor 'device'."
        )
    return name


def weights_of(text: str) -> dict[str, float]:
    """The weights in the text that a weights knob has: {"nvme": 2.0, "pfs": 1.0} of `nvme:2,pfs:1`."""
    return {name: float(weight) for name, _, weight in (part.partition(":") for part in text.split(","))}


# ---- numbers


def _parse_number(spec: KnobSpec, value: object) -> KnobValue:
    number = _number(value)
    if not spec.minimum <= number <= spec.maximum:
        raise spec.out_of_range(value)
    return number


def _number(value: object) -> float:
    """NaN for what is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _number_bounds(spec: KnobSpec) -> str:
    return f"a number from {spec.minimum:g} to {spec.maximum:g}"


# ---- sizes


def _parse_size(spec: KnobSpec, value: object) -> KnobValue:
    nbytes = _whole_bytes(value)
    if nbytes is None or not spec.minimum <= nbytes <= spec.maximum:
        raise spec.out_of_range(value)
    return nbytes


def _whole_bytes(value: object) -> int | None:
    """Bytes of `12GiB`, `512 MB` or a plain number; None for what is no size. Only with a unit is it rounded down."""
    if isinstance(value, int | float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    found = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if found is None or (found[2] and found[2] not in _UNITS):
        return None
    exact = Fraction(found[1]) * _UNITS.get(found[2], 1)
    return int(exact) if found[2] or exact.denominator == 1 else None


def show_size(nbytes: float) -> str:
    """8GiB, 512MB, 1.5GiB: exact where three decimals suffice, else rounded to four digits; 0 as it is."""
    if nbytes < 1000:
        return f"{nbytes:g}B" if nbytes else "0"
    fitting = [(name, unit) for name, unit in _SHOWN_UNITS if nbytes >= unit]
    texts = [(f"{nbytes / unit:.3f}".rstrip("0").rstrip("."), name, unit) for name, unit in fitting]
    exact = [f"{text}{name}" for text, name, unit in texts if Fraction(text) * unit == nbytes < 10_000 * unit]
    return min(exact, key=len, default=f"{nbytes / fitting[0][1]:.4g}{fitting[0][0]}")


def _size_bounds(spec: KnobSpec) -> str:
    return f"bytes from {show_size(spec.minimum)} to {show_size(spec.maximum)}, as in 12GiB or 512MB"


# ---- weights of paths


def _parse_weights(spec: KnobSpec, value: object) -> KnobValue:
    if isinstance(value, Mapping):
        pairs = [(str(name).strip(), weight) for name, weight in value.items()]
    elif isinstance(value, str):
        parts = [part.partition(":") for part in value.split(",")]
        pairs = [(name.strip(), weight.strip()) for name, _, weight in parts]
    else:
        raise spec.out_of_range(value)
    weights = {name: _weight(spec, value, name, weight) for name, weight in pairs}
    if len(weights) < len(pairs):
        raise KnobError(f"{spec.name}={value!r} names a path twice: give each path one weight.", spec.name)
    if not any(weights.values()):
        raise KnobError(f"{spec.name}={value!r} has no weight above 0: give at least one path more.", spec.name)
    return ",".join(f"{name}:{_plain(weights[name])}" for name in sorted(weights))


def _weight(spec: KnobSpec, value: object, name: str, weight: object) -> float:
    try:
        check_path_name(name)
    except ConfigError as error:
        raise KnobError(f"{spec.name}={value!r} is not valid: {error} Write {_form(spec)}.", spec.name) from error
    if spec.paths and name not in spec.paths:
        known = ", ".join(spec.paths)
        raise KnobError(f"{spec.name}={value!r} names {name!r}; the run's paths are: {known}.", spec.name)
    number = math.nan if isinstance(weight, bool) else _number(weight)
    if not spec.minimum <= number <= spec.maximum:
        raise KnobError(
            f"{spec.name}={value!r} gives {name!r} the weight {weight!r}: a number from {spec.minimum:g} to "
            f"{spec.maximum:g} is needed, as in {_form(spec)}.",
            spec.name,
        )
    return number


def _plain(weight: float) -> str:
    return str(int(weight)) if weight == int(weight) else repr(weight)


def _ratios(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Shares of those that get any, of the numbers as they were written: 0.1 is a tenth."""
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items() if weight > 0}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


def _form(spec: KnobSpec) -> str:
    names = spec.paths or ("nvme", "pfs")
    return ",".join(f"{name}:{2 if place == 0 else 1}" for place, name in enumerate(names[:3]))


def _weights_bounds(spec: KnobSpec) -> str:
    of = f" of the paths {', '.join(spec.paths)}" if spec.paths else " of paths"
    return f"weights{of}, as in {_form(spec)}"


# ---- the table


class _Kind(NamedTuple):
    parse: Callable[[KnobSpec, object], KnobValue]
    show: Callable[[float], str]
    bounds: Callable[[KnobSpec], str]


def _parse_choice(spec: KnobSpec, value: object) -> KnobValue:
    raise spec.out_of_range(value)


def _no_bounds(_: KnobSpec) -> str:
    return ""


def _general(number: float) -> str:
    return f"{number:g}"


_KINDS: Final[dict[KnobKind, _Kind]] = {
    "number": _Kind(_parse_number, _general, _number_bounds),
    "size": _Kind(_parse_size, show_size, _size_bounds),
    "weights": _Kind(_parse_weights, _general, _weights_bounds),
    "choice": _Kind(_parse_choice, _general, _no_bounds),
}
