"""Messages about knobs and their generations, for operators who read and change them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.comparison import Difference
from tidegate.knobs.knobs import KnobKind, KnobSpec
from tidegate.wire.base import (
    Count,
    Finite,
    KnobChanges,
    Label,
    Liveness,
    Message,
    PathName,
    Rank,
    RunName,
    Seconds,
    Sum,
    Text,
)
from tidegate.wire.canary import CanaryRequest, CanaryView

GenerationState = Literal["proposed", "committed", "applied", "refused", "aborted", "superseded"]


class KnobBound(Message):
    """The accepted values of a knob of one run: the fields of a `KnobSpec`, without its name."""

    kind: KnobKind = "number"
    minimum: float
    maximum: float
    words: tuple[str, ...]
    unit: str
    help: str
    paths: tuple[str, ...] = ()
    """Names of the storage paths that the knob's value may contain."""

    @classmethod
    def of(cls, spec: KnobSpec) -> KnobBound:
        """The bounds of `spec`."""
        return cls(**{name: getattr(spec, name) for name in cls.model_fields})

    def spec(self, name: str) -> KnobSpec:
        """The spec of the knob `name` within these bounds."""
        return KnobSpec(name=name, **self.model_dump())


class RankKnobs(Message):
    """One rank's knobs: the generation that it has applied, the values that it uses, and a refusal."""

    rank: Rank
    liveness: Liveness
    applied_generation: Count
    effective: KnobChanges
    state_bytes: Sum = 0
    """Bytes of the state of all subgroups of this rank: more of `host_cache` is not used. 0 if that is not known."""
    refused: str | None = None
    """The reason for which this rank refused the newest generation; None if it did not."""


class MeasuredEffect(Message):
    """Measured effect of a generation: median update seconds of the steps before and after it, on the lead rank (the
    lowest rank that is present), and their comparison. The version before did not store the comparison."""

    steps_before: Count
    steps_after: Count
    update_seconds_before: Seconds
    update_seconds_after: Seconds
    update_shift: Finite | None = None
    """Hodges-Lehmann estimate of the change, as a share of the median before. Positive: the update takes longer."""
    difference: Difference | None = None
    """Whether the update became faster or slower. A difference is clear if chance alone gives it at most once in a
    hundred changes."""


class GenerationView(Message):
    """One generation of a run's knobs: the requested change, its author, and its outcome."""

    run: RunName
    generation: Count
    state: GenerationState
    knobs: KnobChanges
    changes: KnobChanges
    author: Label
    reason: Text = ""
    created_at: float
    decided_at: float | None = None
    outcome: Text = ""
    """How the generation was decided, as a sentence: for example why it was refused, aborted or superseded, with
    figures and the rank. Empty before the decision."""
    applied: dict[int, int] = {}
    """The first step with this generation, by rank."""
    measured_effect: MeasuredEffect | None = None
    canary: CanaryView | None = None
    """The canary of this generation, if it has or had one."""
    restores: Count | None = None
    """For a rollback: the generation whose knobs this generation restores."""


class KnobsView(Message):
    """Answer to `GET /v1/runs/{run}/knobs`; its ETag is the number of the newest generation."""

    run: RunName
    generation: Count
    desired: KnobChanges
    """The knobs of the newest committed generation: in force now, or from the next step on. If the run has no storage
    paths, the knobs of storage paths are left out here and in `bounds`."""
    bounds: dict[str, KnobBound]
    retired: dict[PathName, Text] = {}
    """Paths that have failed on a rank, with the rank and the reason; `tier_split` can give them no weight."""
    ranks: tuple[RankKnobs, ...]
    pending: GenerationView | None = None


class KnobPatch(Message):
    """Body of `PATCH /v1/runs/{run}/knobs`."""

    changes: Annotated[KnobChanges, Field(min_length=1, max_length=16)]
    reason: Text = ""
    canary: CanaryRequest | None = None
    """If set, the change is kept only if the steps with it are not worse than the steps before."""
