"""The rate card: measured speeds of a machine's copies and updates, and the op run times that follow from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from tidegate.errors import ConfigError
from tidegate.plan.interference import InterferenceFactors
from tidegate.plan.ops import D2H, H2D, LANE_OF, Op, OpKind, path_lanes
from tidegate.plan.tier_split import PathSpeeds
from tidegate.timeline.stall_analysis import busy_seconds
from tidegate.timeline.timeline import Span

# Names of the rates of ops that are measured in parameters per second, then of copies over the link in bytes per
# second.
RATE_OF: Final[dict[OpKind, str]] = {
    OpKind.CPU_UPDATE: "cpu_params_per_second",
    OpKind.DEVICE_UPDATE: "device_params_per_second",
    OpKind.NORM: "norm_params_per_second",
    OpKind.GRAD_NORM: "norm_params_per_second",
}
LINK_RATE_OF: Final[dict[str, str]] = {H2D: "h2d_bytes_per_second", D2H: "d2h_bytes_per_second"}
RATE_NAME_OF: Final[dict[OpKind, str]] = {
    kind: LINK_RATE_OF.get(lane) or RATE_OF[kind] for kind, lane in LANE_OF.items()
}
"""The name of the rate of each kind of op. FETCH and FLUSH are absent: each path has a rate for each of them, with the
name of the path's lane."""

MeasuredWork = dict[str, tuple[int, float]]
"""The work of one step, by name of the rate: the amount (bytes or parameters), and the seconds in which ops with this
rate were running."""


@dataclass(frozen=True, kw_only=True)
class PathRates:
    """Measured speeds of one path in bytes per second. None: not measured yet; a number is positive."""

    read_bytes_per_second: float | None = None
    write_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} of a path must be positive. Run `tidegate calibrate` again.")


@dataclass(frozen=True, kw_only=True)
class RateCard:
    """The measured speeds of a machine. None: not measured yet. Numbers are positive (overheads: not negative).

    The run time of an op is `overhead_seconds`, plus the `op_seconds` of its lane, plus its bytes or parameters divided
    by the rate of its lane or kind.
    """

    h2d_bytes_per_second: float | None = None
    d2h_bytes_per_second: float | None = None
    cpu_params_per_second: float | None = None
    device_params_per_second: float | None = None
    norm_params_per_second: float | None = None
    overhead_seconds: float | None = None
    step_seconds: float | None = None
    """Fixed time of a step outside its ops: from the call of `step()` to the first op, and after the last op."""
    paths: Mapping[str, PathRates] = field(default_factory=dict)
    """Speeds by name of the path."""
    op_seconds: Mapping[str, float] = field(default_factory=dict)
    """Fixed seconds per op, by lane; 0 where absent."""
    keeps: InterferenceFactors = field(default_factory=dict)
    """Interference factors: `keeps[lane][other]` is the speed of `lane` while `other` works, divided by its speed
    alone; above 0 and up to 1, and 1 where absent."""

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
        """Names of the rates that are not known. Fixed costs of steps and ops are not in it: they count as 0 if they
        are not known."""
        scalars = [name for name in _SCALARS if name not in _MAY_BE_0 and getattr(self, name) is None]
        return (*scalars, *(lane for lane, rate in _by_lane(self.paths).items() if rate is None))

    def seconds(self, op: Op, /) -> float:
        """Expected run time of `op` in seconds. ConfigError when the rate that it needs is not known."""
        name = rate_name(op)
        rate: float | None = getattr(self, name) if op.kind in RATE_NAME_OF else _by_lane(self.paths).get(name)
        if rate is None:
            raise ConfigError(
                f"The rate card lacks the rate {name}, which {op.name} needs: it was not measured yet. Run "
                "`tidegate calibrate`, or wait until a step has measured it."
            )
        fixed = (self.overhead_seconds or 0.0) + self.op_seconds.get(op.lane, 0.0)
        return fixed + (op.numel if op.kind in RATE_OF else op.nbytes) / rate

    @classmethod
    def from_measured_work(cls, steps: Collection[MeasuredWork], previous: RateCard | None = None) -> RateCard:
        """Makes a rate card from the work of measured steps (`measured_work`): a rate is bytes or parameters divided by
        busy seconds. Rates without a measurement are taken from `previous`.

        Busy seconds include the fixed costs of ops and the interference between lanes. So if at least one rate is
        measured, the new card has no overhead, no `op_seconds` and no `keeps`.
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
        """The rate with this name (`rate_name`); None when it is not known."""
        return getattr(self, name) if name in _SCALARS else _by_lane(self.paths).get(name)

    def with_rates(self, rates: Mapping[str, float]) -> RateCard:
        """A copy of this rate card in which `rates` (speeds by name, see `rate_name`) replace the speeds of the same
        names."""
        scalars: dict[str, Any] = {name: rate for name, rate in rates.items() if name in _SCALARS}
        paths = dict(self.paths)
        for lane in [name for name in rates if name not in _SCALARS]:
            path, _, direction = lane.rpartition(":")
            paths[path] = replace(paths.get(path, PathRates()), **{f"{direction}_bytes_per_second": rates[lane]})
        return replace(self, **scalars, paths=paths)

    def with_paths(self, speeds: Mapping[str, PathSpeeds]) -> RateCard:
        """A copy of this rate card in which `speeds` (by name of the path) replace the speeds of these paths, and
        the interference factors of their reads and writes. Measured `op_seconds` of these paths are dropped, because
        they belong to the replaced speeds."""
        keeps = {lane: dict(others) for lane, others in self.keeps.items()}
        for path, known in speeds.items():
            lanes = path_lanes(path)
            for lane, other, factor in zip(lanes, reversed(lanes), known.factors, strict=True):
                keeps.setdefault(lane, {})[other] = factor
        paths = {
            path: PathRates(
                read_bytes_per_second=known.read_bytes_per_second, write_bytes_per_second=known.write_bytes_per_second
            )
            for path, known in speeds.items()
        }
        others = {lane: cost for lane, cost in self.op_seconds.items() if lane not in _by_lane(paths)}
        return replace(self, paths={**self.paths, **paths}, keeps=keeps, op_seconds=others)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: numbers and None by name. `paths`, `op_seconds` and `keeps` only if not empty."""
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
        """The inverse of `to_dict`. Unknown names (of newer versions) are ignored, and a rate of 0 means not
        measured."""
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
    """The name of the rate of `op`: the rate of its kind; for an op on a storage path, the name of its lane."""
    return RATE_NAME_OF.get(op.kind) or op.lane


def _by_lane(paths: Mapping[str, PathRates]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for path, rates in paths.items():
        read, write = path_lanes(path)
        found |= {read: rates.read_bytes_per_second, write: rates.write_bytes_per_second}
    return found


def measured_work(spans: Sequence[Span]) -> MeasuredWork:
    """The amount and the busy seconds of each rate in one step. A single pass over the spans, because it runs after
    every training step."""
    found: MeasuredWork = {}
    ends: dict[str, float] = {}
    overlapping: set[str] = set()
    for span in spans:
        kind, start, end = span.kind, span.start, span.end
        name = RATE_NAME_OF.get(kind) or span.lane
        amount = span.numel if kind in RATE_OF else span.nbytes
        if name not in found:
            found[name] = (amount, end - start)
        else:
            total, busy = found[name]
            found[name] = (total + amount, busy + end - start)
            if start < ends[name]:
                overlapping.add(name)
        ends[name] = end
    for name in overlapping:
        found[name] = (found[name][0], busy_seconds([span for span in spans if rate_name(span) == name]))
    return found
