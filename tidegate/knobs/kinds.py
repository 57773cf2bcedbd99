"""The kinds of knobs (number, size in bytes, weights of paths, choice of words), with parser and formatter of each."""

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
    """The accepted values of one knob. `words`: words that are accepted in addition to values of the knob's kind.

    minimum, maximum: bounds of a number, of a size in bytes, or of each weight; a choice has no bounds.
    paths: the paths that weights may name; empty while the paths are not known.
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
        """The value in its normal form: a number, whole bytes, weights as text, or one of `words`.

        KnobError, naming value and bounds, if the value is not accepted.
        """
        if isinstance(value, str) and value.strip().lower() in self.words:
            return value.strip().lower()
        if isinstance(value, bool):
            raise self.out_of_range(value)
        return _KINDS[self.kind].parse(self, value)

    def show(self, value: KnobValue) -> str:
        """The value as text for display; `parse` accepts this text."""
        return value if isinstance(value, str) else _KINDS[self.kind].show(value)

    def same(self, value: KnobValue, other: KnobValue) -> bool:
        """Whether both values mean the same. Values such as `nvme:2,pfs:1` mean the same if the ratios are equal."""
        if self.kind != "weights" or value in self.words or other in self.words:
            return value == other
        return _ratios(weights_of(str(value))) == _ratios(weights_of(str(other)))

    @property
    def bounds(self) -> str:
        """Description of the accepted values, for messages."""
        of_kind = _KINDS[self.kind].bounds(self)
        return " or ".join([*([of_kind] if of_kind else []), *(repr(word) for word in self.words)])

    def out_of_range(self, value: object) -> KnobError:
        """The error for a value that is not accepted; the caller raises it."""
        return KnobError(f"{self.name}={value!r} is out of range: {self.bounds}.", self.name)


def check_path_name(name: str) -> str:
    """Returns `name` if it is a valid name of a storage path; ConfigError otherwise."""
    if not _PATH_NAME.fullmatch(name) or name in _RESIDENCES:
        raise ConfigError(
            f"A path cannot be called {name!r}: use 1 to 32 of a-z, 0-9, _ and -, and neither 'host' nor 'device'."
        )
    return name


def weights_of(text: str) -> dict[str, float]:
    """The weights in the text of a weights knob: {"nvme": 2.0, "pfs": 1.0} for `nvme:2,pfs:1`."""
    return {name: float(weight) for name, _, weight in (part.partition(":") for part in text.split(","))}


# ---- numbers


def _parse_number(spec: KnobSpec, value: object) -> KnobValue:
    number = number_of(value)
    if not spec.minimum <= number <= spec.maximum:
        raise spec.out_of_range(value)
    return number


def number_of(value: object) -> float:
    """`value` as a float; NaN if it is not a number."""
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
    """Bytes of `12GiB`, `512 MB` or a plain number; None if `value` is not a size.

    Fractions of a byte are rounded down if a unit is given; without a unit they are not a size.
    """
    if isinstance(value, int | float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None or (match[2] and match[2] not in _UNITS):
        return None
    exact = Fraction(match[1]) * _UNITS.get(match[2], 1)
    return int(exact) if match[2] or exact.denominator == 1 else None


def show_size(nbytes: float) -> str:
    """A size as text, such as 8GiB, 512MB or 1.5GiB: exact if three decimals suffice, else rounded to four digits. Zero
    is `0`, without a unit."""
    if nbytes < 1000:
        return f"{nbytes:g}B" if nbytes else "0"
    fitting = [(name, unit) for name, unit in _SHOWN_UNITS if nbytes >= unit]
    texts = [(f"{nbytes / unit:.3f}".rstrip("0").rstrip("."), name, unit) for name, unit in fitting]
    exact = [f"{text}{name}" for text, name, unit in texts if Fraction(text) * unit == nbytes < 10_000 * unit]
    return min(exact, key=len, default=f"{nbytes / fitting[0][1]:.4g}{fitting[0][0]}")


def larger_than_state(cache: int, state: int, rank: int) -> str:
    """The sentence on a `host_cache` of more bytes than the state of a rank has."""
    return (
        f"host_cache={show_size(cache)} is more than the state of rank {rank}, {show_size(state)}: only as much as the "
        "state needs is used."
    )


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
        raise KnobError(f"{spec.name}={value!r} has no weight above 0: at least one path needs one.", spec.name)
    return ",".join(f"{name}:{_plain(weights[name])}" for name in sorted(weights))


def _weight(spec: KnobSpec, value: object, name: str, weight: object) -> float:
    try:
        check_path_name(name)
    except ConfigError as error:
        raise KnobError(f"{spec.name}={value!r} is not valid: {error} Example: {_example(spec)}.", spec.name) from error
    if spec.paths and name not in spec.paths:
        known = ", ".join(spec.paths)
        raise KnobError(f"{spec.name}={value!r} names {name!r}; the run's paths are: {known}.", spec.name)
    number = math.nan if isinstance(weight, bool) else number_of(weight)
    if not spec.minimum <= number <= spec.maximum:
        raise KnobError(
            f"{spec.name}={value!r} gives {name!r} the weight {weight!r}: a number from {spec.minimum:g} to "
            f"{spec.maximum:g} is needed, as in {_example(spec)}.",
            spec.name,
        )
    return number


def _plain(weight: float) -> str:
    return str(int(weight)) if weight == int(weight) else repr(weight)


def _ratios(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """The share of each path with a positive weight: its weight divided by the sum of the weights. Exact fractions, in
    which the weight 0.1 counts as 1/10."""
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items() if weight > 0}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


def _example(spec: KnobSpec) -> str:
    """Weights as an example for messages, such as `nvme:2,pfs:1`."""
    names = spec.paths or ("nvme", "pfs")
    return ",".join(f"{name}:{2 if place == 0 else 1}" for place, name in enumerate(names[:3]))


def _weights_bounds(spec: KnobSpec) -> str:
    of = f" of the paths {', '.join(spec.paths)}" if spec.paths else " of paths"
    return f"weights{of}, as in {_example(spec)}"


# ---- the table


class _Kind(NamedTuple):
    """The functions of one kind of knob: parser, formatter of numbers, and description of the accepted values."""

    parse: Callable[[KnobSpec, object], KnobValue]
    show: Callable[[float], str]
    bounds: Callable[[KnobSpec], str]


def _parse_choice(spec: KnobSpec, value: object) -> KnobValue:
    raise spec.out_of_range(value)


_KINDS: Final[dict[KnobKind, _Kind]] = {
    "number": _Kind(_parse_number, "{:g}".format, _number_bounds),
    "size": _Kind(_parse_size, show_size, _size_bounds),
    "weights": _Kind(_parse_weights, "{:g}".format, _weights_bounds),
    "choice": _Kind(_parse_choice, "{:g}".format, lambda _: ""),
}
