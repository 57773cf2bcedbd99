"""The rate card: how fast this machine copies and updates, and from that how long an op takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from tidegate.analysis import busy_seconds
from tidegate.errors import ConfigError
from tidegate.plan.ops import D2H, H2D, LANE_OF, Op, OpKind
from tidegate.timeline import Span, Timeline

RATE_OF: Final[dict[OpKind, str]] = {
    OpKind.CPU_UPDATE: "cpu_params_per_second",
    OpKind.DEVICE_UPDATE: "device_params_per_second",
    OpKind.NORM: "norm_params_per_second",
    OpKind.GRAD_NORM: "norm_params_per_second",
}
LINK_RATE_OF: Final[dict[str, str]] = {H2D: "h2d_bytes_per_second", D2H: "d2h_bytes_per_second"}
NAME_OF: Final[dict[OpKind, str]] = {kind: LINK_RATE_OF.get(lane) or RATE_OF[kind] for kind, lane in LANE_OF.items()}
"""The rate that ops of a kind run at."""

Seen = dict[str, tuple[int, float]]
"""What one step shows of each rate, by its name: bytes or parameters, and the seconds in which they were under way."""


@dataclass(frozen=True, kw_only=True)
class RateCard:
    """Measured speeds. None is a speed nobody has seen yet; a number is positive (overhead: not negative).

    An op takes `overhead_seconds` plus its bytes or parameters divided by the rate of its lane or kind.
    """

    h2d_bytes_per_second: float | None = None
    d2h_bytes_per_second: float | None = None
    cpu_params_per_second: float | None = None
    device_params_per_second: float | None = None
    norm_params_per_second: float | None = None
    overhead_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if value is not None and not (value >= 0 if name == "overhead_seconds" else value > 0):
                raise ConfigError(f"{name}={value!r} in a rate card must be positive. Run `tidegate calibrate` again.")

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the rates that are not known. Overhead that is not known counts as none."""
        return tuple(name for name, value in self.to_dict().items() if value is None and name != "overhead_seconds")

    def seconds(self, op: Op, /) -> float:
        """Expected run time of `op` in seconds. Raises ConfigError when the rate that it needs is not known."""
        name = NAME_OF[op.kind]
        rate: float | None = getattr(self, name)
        if rate is None:
            raise ConfigError(f"The rate card lacks {name}, which {op.name} needs. Run `tidegate calibrate`.")
        return (self.overhead_seconds or 0.0) + (op.numel if op.kind in RATE_OF else op.nbytes) / rate

    @classmethod
    def from_timelines(cls, timelines: Iterable[Timeline], previous: RateCard | None = None) -> RateCard:
        """Rates seen in `timelines`: bytes or parameters over busy seconds. What was not seen is from `previous`.

        Busy seconds contain the overhead of the ops, so that a card with any rate measured here has an overhead of 0.
        """
        return cls.from_seen([seen(timeline.spans) for timeline in timelines], previous)

    @classmethod
    def from_seen(cls, steps: Collection[Seen], previous: RateCard | None = None) -> RateCard:
        """As `from_timelines`, from what was `seen` in each step."""
        rates: dict[str, float] = {}
        for name in (*LINK_RATE_OF.values(), *RATE_OF.values()):
            found = [step[name] for step in steps if name in step]
            amount, busy = sum(amount for amount, _ in found), sum(seconds for _, seconds in found)
            if amount > 0 and busy > 0:
                rates[name] = amount / busy
        if rates:
            rates["overhead_seconds"] = 0.0
        return cls(**{**(previous.to_dict() if previous else {}), **rates})

    def to_dict(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RateCard:
        """The card that `to_dict` gave; names of newer versions are ignored."""
        return cls(**{name: value for name, value in values.items() if name in _NAMES})


_NAMES: Final = tuple(field.name for field in fields(RateCard))


def seen(spans: Sequence[Span]) -> Seen:
    """Amount and busy seconds of each rate in one step, in one pass: it runs after every step of a training."""
    found: Seen = {}
    ends: dict[str, float] = {}
    overlapping: set[str] = set()
    for span in spans:
        name = NAME_OF[span.kind]
        amount, busy = found.get(name, (0, 0.0))
        if span.start < ends.get(name, span.start):
            overlapping.add(name)
        ends[name] = span.end
        found[name] = (amount + (span.numel if span.kind in RATE_OF else span.nbytes), busy + span.end - span.start)
    for name in overlapping:
        found[name] = (found[name][0], busy_seconds([span for span in spans if NAME_OF[span.kind] == name]))
    return found
