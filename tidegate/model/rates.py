"""The rate card: how fast this machine copies and updates, and from that how long an op takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from tidegate.analysis import busy_seconds
from tidegate.errors import ConfigError
from tidegate.plan.ops import D2H, H2D, Op, OpKind
from tidegate.timeline import Span, Timeline

RATE_OF: Final[dict[OpKind, str]] = {
    OpKind.CPU_UPDATE: "cpu_params_per_second",
    OpKind.DEVICE_UPDATE: "device_params_per_second",
    OpKind.NORM: "norm_params_per_second",
    OpKind.GRAD_NORM: "norm_params_per_second",
}
LINK_RATE_OF: Final[dict[str, str]] = {H2D: "h2d_bytes_per_second", D2H: "d2h_bytes_per_second"}


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
        name = LINK_RATE_OF.get(op.lane) or RATE_OF[op.kind]
        rate: float | None = getattr(self, name)
        if rate is None:
            raise ConfigError(f"The rate card lacks {name}, which {op.name} needs. Run `tidegate calibrate`.")
        return (self.overhead_seconds or 0.0) + (op.nbytes if op.lane in LINK_RATE_OF else op.numel) / rate

    @classmethod
    def from_timelines(cls, timelines: Iterable[Timeline], previous: RateCard | None = None) -> RateCard:
        """Rates seen in `timelines`: bytes or parameters over busy seconds. What was not seen is from `previous`.

        Busy seconds contain the overhead of the ops, so that a card with any rate measured here has an overhead of 0.
        """
        steps = [timeline.spans for timeline in timelines]
        rates: dict[str, float] = {}
        for lane, name in LINK_RATE_OF.items():
            runs = [[span for span in spans if span.lane == lane] for spans in steps]
            rates |= _rate(name, runs, sum(span.nbytes for spans in runs for span in spans))
        for kind, name in RATE_OF.items():
            runs = [[span for span in spans if span.kind is kind] for spans in steps]
            rates |= _rate(name, runs, sum(span.numel for spans in runs for span in spans))
        if rates:
            rates["overhead_seconds"] = 0.0
        return cls(**{**(previous.to_dict() if previous else {}), **rates})

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RateCard:
        """The card that `to_dict` gave; names of newer versions are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def _rate(name: str, runs: Iterable[Sequence[Span]], amount: int) -> dict[str, float]:
    """`{name: rate}`, or nothing when it was not seen. `runs` are the spans of each step, which share no clock."""
    busy = sum(busy_seconds(spans) for spans in runs)
    return {name: amount / busy} if amount > 0 and busy > 0 else {}
