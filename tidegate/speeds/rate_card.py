"""The rate card: how fast this machine copies and updates, and from that how long an op takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from tidegate.errors import ConfigError
from tidegate.plan.ops import D2H, H2D, LANE_OF, Op, OpKind, path_lanes
from tidegate.plan.tier_split import PathSpeeds
from tidegate.timeline.stall_analysis import busy_seconds
from tidegate.timeline.timeline import Span

RATE_OF: Final[dict[OpKind, str]] = {
    OpKind.CPU_UPDATE: "cpu_params_per_second",
    OpKind.DEVICE_UPDATE: "device_params_per_second",
    OpKind.NORM: "norm_params_per_second",
    OpKind.GRAD_NORM: "norm_params_per_second",
}
LINK_RATE_OF: Final[dict[str, str]] = {H2D: "h2d_bytes_per_second", D2H: "d2h_bytes_per_second"}
NAME_OF: Final[dict[OpKind, str]] = {kind: LINK_RATE_OF.get(lane) or RATE_OF[kind] for kind, lane in LANE_OF.items()}
"""The rate that ops of a kind run at. FETCH and FLUSH have one for each path: theirs are called like their lanes."""

SHARED: Final = 0.5
"""Share of its speed that each direction of a device keeps that serves both in turns."""

Seen = dict[str, tuple[int, float]]
"""What one step shows of each rate, by its name: bytes or parameters, and the seconds in which they were under way."""


@dataclass(frozen=True, kw_only=True)
class PathRates:
    """Measured speeds of one path. None is a speed nobody has seen yet; a number is positive."""

    read_bytes_per_second: float | None = None
    write_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} of a path must be positive. Run `tidegate calibrate` again.")


@dataclass(frozen=True, kw_only=True)
class RateCard:
    """Measured speeds. None is a speed nobody has seen yet; a number is positive (overhead: not negative).

    An op takes `overhead_seconds`, the `op_seconds` of its lane, and its bytes or parameters divided by the rate of its
    lane or kind.
    """

    h2d_bytes_per_second: float | None = None
    d2h_bytes_per_second: float | None = None
    cpu_params_per_second: float | None = None
    device_params_per_second: float | None = None
    norm_params_per_second: float | None = None
    overhead_seconds: float | None = None
    step_seconds: float | None = None
    """What a step takes beside its ops: from the call of `step()` to the first of them, and after the last."""
    paths: Mapping[str, PathRates] = field(default_factory=dict)
    """By name of the path."""
    op_seconds: Mapping[str, float] = field(default_factory=dict)
    """By lane, what each of its ops takes however small it is; 0 where absent."""
    keeps: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Contention: `keeps[lane][other]` is the share of its speed alone that `lane` keeps while `other` works, above 0
    and up to 1; what is not there is 1."""

    def __post_init__(self) -> None:
        for name in _SCALARS:
            value: float | None = getattr(self, name)
            if value is not None and not (value >= 0 if name in _MAY_BE_0 else value > 0):
                raise ConfigError(f"{name}={value!r} in a rate card must be positive. Run `tidegate calibrate` again.")
        for lane, seconds in self.op_seconds.items():
            if not seconds >= 0:
                raise ConfigError(
                    f"op_seconds[{lane!r}]={seconds!r} in a rate card must not be negative. Run `tidegate calibrate` "
                    "again."
                )
        for lane, others in self.keeps.items():
            for other, share in others.items():
                if not 0 < share <= 1:
                    raise ConfigError(
                        f"keeps[{lane!r}][{other!r}]={share!r} in a rate card must be above 0 and at most 1. "
                        "Run `tidegate calibrate` again."
                    )

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the rates that are not known. What a step or an op costs counts as nothing where it is not known."""
        scalars = [name for name in _SCALARS if name not in _MAY_BE_0 and getattr(self, name) is None]
        return (*scalars, *(lane for lane, rate in _by_lane(self.paths).items() if rate is None))

    def seconds(self, op: Op, /) -> float:
        """Expected run time of `op` in seconds. Raises ConfigError when the rate that it needs is not known."""
        name = rate_name(op)
        rate: float | None = getattr(self, name) if op.kind in NAME_OF else _by_lane(self.paths).get(name)
        if rate is None:
            raise ConfigError(f"The rate card lacks {name}, which {op.name} needs: it was not measured yet.")
        fixed = (self.overhead_seconds or 0.0) + self.op_seconds.get(op.lane, 0.0)
        return fixed + (op.numel if op.kind in RATE_OF else op.nbytes) / rate

    @classmethod
    def from_seen(cls, steps: Collection[Seen], previous: RateCard | None = None) -> RateCard:
        """Rates from what was `seen` in each step: bytes or parameters over busy seconds. What was not is from
        `previous`.

        Busy seconds contain what ops cost and what lanes took from each other: a card with any rate measured here has
        nothing of that beside.
        """
        rates: dict[str, float] = {}
        for name in dict.fromkeys(name for step in steps for name in step):
            found = [step[name] for step in steps if name in step]
            amount, busy = sum(amount for amount, _ in found), sum(seconds for _, seconds in found)
            if amount > 0 and busy > 0:
                rates[name] = amount / busy
        if not rates:
            return previous or cls()
        return replace((previous or cls()).with_rates(rates), overhead_seconds=0.0, op_seconds={}, keeps={})

    def rate(self, name: str) -> float | None:
        """That of a `rate_name`; None when it is not known."""
        return getattr(self, name) if name in _SCALARS else _by_lane(self.paths).get(name)

    def with_rates(self, rates: Mapping[str, float]) -> RateCard:
        """This card with these rates, by their names (`rate_name`)."""
        scalars: dict[str, Any] = {name: rate for name, rate in rates.items() if name in _SCALARS}
        paths = dict(self.paths)
        for lane in [name for name in rates if name not in _SCALARS]:
            path, _, direction = lane.rpartition(":")
            paths[path] = replace(paths.get(path, PathRates()), **{f"{direction}_bytes_per_second": rates[lane]})
        return replace(self, **scalars, paths=paths)

    def with_paths(self, speeds: Mapping[str, PathSpeeds]) -> RateCard:
        """This card with these speeds for paths; one that is not duplex gives each direction half while both work. What
        their ops were measured to cost went with other speeds."""
        keeps = {lane: dict(others) for lane, others in self.keeps.items()}
        for path, known in speeds.items():
            read, write = path_lanes(path)
            for lane, other in ((read, write), (write, read)):
                keeps[lane] = {**keeps.get(lane, {}), other: 1.0 if known.duplex else SHARED}
        paths = {
            path: PathRates(
                read_bytes_per_second=known.read_bytes_per_second, write_bytes_per_second=known.write_bytes_per_second
            )
            for path, known in speeds.items()
        }
        others = {lane: cost for lane, cost in self.op_seconds.items() if lane not in _by_lane(paths)}
        return replace(self, paths={**self.paths, **paths}, keeps=keeps, op_seconds=others)

    def to_dict(self) -> dict[str, Any]:
        """Numbers and None by name; what is by the names of paths and lanes only when there is any."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _SCALARS}
        if self.paths:
            found["paths"] = {path: asdict(rates) for path, rates in self.paths.items()}
        if self.op_seconds:
            found["op_seconds"] = dict(self.op_seconds)
        if self.keeps:
            found["keeps"] = {lane: dict(others) for lane, others in self.keeps.items()}
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RateCard:
        """The card that `to_dict` gave; names of newer versions are ignored, and a rate of 0 is one nobody has seen."""
        scalars = {name: value for name, value in values.items() if name in _SCALARS}
        return cls(
            **{name: value if name in _MAY_BE_0 else value or None for name, value in scalars.items()},
            paths={
                path: PathRates(**{name: value or None for name, value in rates.items() if name in _PATH_RATES})
                for path, rates in values.get("paths", {}).items()
            },
            op_seconds=values.get("op_seconds", {}),
            keeps=values.get("keeps", {}),
        )


_MAY_BE_0: Final = ("overhead_seconds", "step_seconds")
_PATH_RATES: Final = tuple(field.name for field in fields(PathRates))
_SCALARS: Final = tuple(field.name for field in fields(RateCard) if field.name not in ("paths", "op_seconds", "keeps"))


def rate_name(op: Op | Span) -> str:
    """The rate that `op` runs at: that of its kind, or what its lane is called, on a path."""
    return NAME_OF.get(op.kind) or op.lane


def _by_lane(paths: Mapping[str, PathRates]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for path, rates in paths.items():
        read, write = path_lanes(path)
        found |= {read: rates.read_bytes_per_second, write: rates.write_bytes_per_second}
    return found


def seen(spans: Sequence[Span]) -> Seen:
    """Amount and busy seconds of each rate in one step, in one pass: it runs after every step of a training."""
    found: Seen = {}
    ends: dict[str, float] = {}
    overlapping: set[str] = set()
    for span in spans:
        kind, start, end = span.kind, span.start, span.end
        name = NAME_OF.get(kind) or span.lane
        amount = span.numel if kind in RATE_OF else span.nbytes
        if name not in found:
            found[name] = (amount, end - start)
        else:
            so_far, busy = found[name]
            found[name] = (so_far + amount, busy + end - start)
            if start < ends[name]:
                overlapping.add(name)
        ends[name] = end
    for name in overlapping:
        found[name] = (found[name][0], busy_seconds([span for span in spans if rate_name(span) == name]))
    return found
