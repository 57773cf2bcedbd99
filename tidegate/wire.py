"""What travels between agent, daemon, command line and screens: one pydantic model for each message.

Times are seconds since the epoch, durations are seconds, sizes are bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tidegate.knobs import KnobKind, KnobSpec, check_path_name
from tidegate.wire_base import Count, Finite, Flag, Label, Message, Number, Seconds, Text, Whole
from tidegate.wire_canary import CanaryRequest, CanaryView

PROTOCOL_VERSION = 2

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rank = Annotated[int, Field(strict=True, ge=0, lt=1_000_000)]
SecondsBy = Annotated[dict[Label, Seconds], Field(max_length=128)]
CountBy = Annotated[dict[Label, Count], Field(max_length=128)]
PathName = Annotated[str, AfterValidator(check_path_name)]
PathOperation = Literal["read", "write"]
DeviceKind = Literal["cuda", "emulated"]
GenerationState = Literal["proposed", "committed", "applied", "refused", "aborted", "superseded"]
Liveness = Literal["live", "stale", "lost", "finished"]
AlertState = Literal["firing", "resolved"]
KnobChanges = dict[str, Finite | Annotated[int, Field(strict=True)] | str]

MAX_SUBGROUPS = 100_000
"""Of one rank: the daemon asks the simulator about each."""


# ---- agent → daemon


class SubgroupSizes(Message):
    """What the simulator needs of a rank's subgroups, grouped by equal size."""

    numel: Count
    count: Annotated[int, Field(strict=True, ge=0, le=MAX_SUBGROUPS)]
    weight_bytes: Count
    grad_bytes: Count
    state_bytes: Count


class Rates(Message):
    """The rank's live rate card: bytes per second and parameters per second; None where nothing was measured yet."""

    h2d_bytes_per_second: Number | None = None
    d2h_bytes_per_second: Number | None = None
    cpu_params_per_second: Number | None = None
    device_params_per_second: Number | None = None
    norm_params_per_second: Number | None = None
    overhead_seconds: Number | None = None
    step_seconds: Number | None = None
    paths: dict[Label, dict[Label, Number | None]] = {}
    op_seconds: dict[Label, Number] = {}
    """What each op of a lane takes however small it is."""
    keeps: dict[Label, dict[Label, Number]] = {}
    """Share of its speed that a lane keeps while another works, by lane and other; see `RateCard`."""


class AgentHello(Message):
    """Registers one rank of a run."""

    protocol: Whole = PROTOCOL_VERSION
    agent: Label
    """A random id that the agent made; the same for its whole life, reconnections included."""
    run: RunName
    rank: Rank
    world_size: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    host: Label
    pid: Count
    device_kind: DeviceKind
    metrics_address: Annotated[str, Field(max_length=300)]
    """host:port of this rank's /metrics, as other machines reach it; empty when it exports none."""
    knobs: KnobChanges
    """Start-up settings: generation 0 of a new run."""
    reset_knobs: Flag = False
    """Start-up settings win over the desired knobs that the run has from before."""
    subgroups: Annotated[tuple[SubgroupSizes, ...], Field(max_length=1024)] = ()
    num_slots: Annotated[int, Field(strict=True, ge=1, le=64)] = 2
    device_memory_bytes: Count | None = None
    """What the device has in all; None where that is not known."""
    host_slots: Annotated[int, Field(strict=True, ge=1, le=1024)] = 3
    """Staging slots in host memory that each storage path has."""
    gradients: Literal["keep", "release"] = "keep"
    policy: Label = "interleaved"
    """The model knows no other."""
    paths: Annotated[tuple[PathName, ...], Field(max_length=64)] = ()
    """Names of the storage paths, in their order; a run without any has no knobs for them."""
    started_at: Finite

    @model_validator(mode="after")
    def _check_subgroups(self) -> AgentHello:
        if (count := sum(sizes.count for sizes in self.subgroups)) > MAX_SUBGROUPS:
            raise ValueError(f"subgroups are {count:,} in all, {MAX_SUBGROUPS:,} at most: make them larger")
        return self


class StepReport(Message):
    """One finished step. Keys of `phase_seconds` are phases; the others are lists of rows."""

    step: Count
    timestamp: Finite
    phase_seconds: SecondsBy
    exposed_seconds: SecondsBy = {}
    stalls: Annotated[tuple[StallRow, ...], Field(max_length=1024)] = ()
    spill_seconds: Seconds = 0.0
    """How long the update went on after `step()` had returned."""
    links: Annotated[tuple[LinkRow, ...], Field(max_length=1024)] = ()
    paths: Annotated[tuple[PathRow, ...], Field(max_length=1024)] = ()
    path_states: Annotated[tuple[PathState, ...], Field(max_length=64)] = ()
    """One for each storage path, as the step ended."""
    device_memory_peak_bytes: CountBy = {}
    host_memory_bytes: CountBy = {}
    cpu_seconds: SecondsBy = {}
    update_params: CountBy = {}
    """By processor: cpu, device."""
    subgroups: CountBy = {}
    """By residence: host, device, or the name of a path."""
    loss: Number | None = None
    tokens: Count | None = None
    grad_norm: Number | None = None
    skipped: Flag = False
    verdict: Text = ""
    """What the update waited for, with figures, and the knob to turn, as a sentence without a final stop."""


class StallRow(Message):
    phase: Label
    cause: Label
    seconds: Seconds


class LinkRow(Message):
    direction: Label
    phase: Label
    content: Label
    bytes: Count
    busy_seconds: Seconds


class PathRow(Message):
    """What one step read from or wrote to one path in one phase; bytes as they were moved, padding included."""

    path: PathName
    operation: PathOperation
    phase: Label
    bytes: Count
    busy_seconds: Seconds


class PathState(Message):
    """One storage path; sums are since the run began."""

    path: PathName
    free_bytes: Count | None = None
    """None where no bound is known."""
    bytes: dict[PathOperation, Count] = {}
    lock_wait_seconds: dict[PathOperation, Seconds] = {}
    errors: dict[PathOperation, Count] = {}
    """Attempts that failed, those that were repeated included."""
    ceiling_bytes_per_second: dict[PathOperation, Seconds] = {}
    """What it could do alone when the run began."""
    written_bytes_per_day: Seconds | None = None
    """At the pace of the last hour; None while it is too early to tell."""
    retired: Flag = False
    """It failed for good: nothing more is written there."""
    capacity_subgroups: Count | None = None
    """How many subgroups it can hold, with those that it holds already, as the step was planned. None where that is
    more than there can be."""


class SpanRow(Message):
    """One span of the last update on its lane, seconds since the timeline's origin."""

    op: Count
    kind: Label
    lane: Label
    subgroup: Whole
    start: Finite
    end: Finite
    nbytes: Count
    numel: Count
    slot: Whole | None = None


class PhaseRow(Message):
    phase: Label
    start: Finite
    end: Finite


class TimelineView(Message):
    """A timeline on the wire. Long ones are cut to their first `MAX_SPANS` spans; `num_spans` counts them all, `deps`
    are those of the spans that are sent."""

    step: Count
    source: Literal["measured", "simulated"]
    origin: Finite
    phases: Annotated[tuple[PhaseRow, ...], Field(max_length=10_000)]
    spans: Annotated[tuple[SpanRow, ...], Field(max_length=4_000)]
    num_spans: Count
    deps: Annotated[dict[int, tuple[Whole, ...]], Field(max_length=10_000)] = {}


MAX_SPANS = 4_000


class Applied(Message):
    """A rank has applied a generation; `step` is the first step that ran with it."""

    generation: Count
    step: Count


class AgentReport(Message):
    """What a rank says about itself, at most once a second; also renews its lease."""

    timestamp: Finite
    step: Count
    phase: Label
    """The phase the rank is in now."""
    generation: Count
    """The newest generation that this rank has applied."""
    applied: Applied | None = None
    """What it has applied since its last report."""
    effective: KnobChanges
    """What `auto` stands for at present; pinned knobs as they are."""
    rates: Rates | None = None
    steps: Annotated[tuple[StepReport, ...], Field(max_length=256)] = ()
    """The steps finished since the last report (the newest 256)."""
    timeline: TimelineView | None = None
    predicted_update_seconds: Seconds | None = None
    finished: Flag = False


class Vote(Message):
    """A rank's answer to a proposed generation."""

    generation: Count
    can: Flag
    reason: Text = ""
    """Why not, with figures."""


# ---- daemon → agent


class Directive(Message):
    """What the daemon wants of a rank now.

    `committed` is the newest generation that all live ranks said yes to, with its knobs: apply it at the next step
    boundary. `proposed`, when set, wants a vote.
    """

    committed: Count
    committed_knobs: KnobChanges
    proposed: Count | None = None
    proposed_knobs: KnobChanges | None = None


class Lease(Message):
    """Answer to AgentHello and to every report: how long the daemon believes in this rank without a word from it."""

    lease_seconds: float
    directive: Directive
    report_seconds: Seconds | None = None
    """How often the daemon wants to hear of it while a canary is judged; None leaves it to the rank."""


# ---- operators


class KnobBound(Message):
    """What a knob of one run accepts: the fields of a `KnobSpec` but its name."""

    kind: KnobKind = "number"
    minimum: float
    maximum: float
    words: tuple[str, ...]
    unit: str
    help: str
    paths: tuple[str, ...] = ()
    """The paths that weights may name."""

    @classmethod
    def of(cls, spec: KnobSpec) -> KnobBound:
        return cls(**{name: getattr(spec, name) for name in cls.model_fields})

    def spec(self, name: str) -> KnobSpec:
        """The spec of the knob `name` within these bounds."""
        return KnobSpec(name=name, **self.model_dump())


class RankKnobs(Message):
    """One rank's view of the knobs."""

    rank: Rank
    liveness: Liveness
    applied_generation: Count
    effective: KnobChanges
    refused: str | None = None
    """Why this rank refused the newest generation, if it did."""


class KnobsView(Message):
    """`GET /v1/runs/{run}/knobs`; its ETag is the newest generation's number."""

    run: RunName
    generation: Count
    desired: KnobChanges
    """The knobs of the newest committed generation: what the run has, or will have at its next step. Those of storage
    paths are here, and in `bounds`, only when the run has paths."""
    bounds: dict[str, KnobBound]
    ranks: tuple[RankKnobs, ...]
    pending: GenerationView | None = None


class GenerationView(Message):
    """One generation of a run: what was asked, by whom, and what became of it."""

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
    """Why it was refused, aborted or superseded, with figures and the rank."""
    applied: dict[int, int] = {}
    """First step that ran with it, by rank."""
    measured_effect: MeasuredEffect | None = None
    canary: CanaryView | None = None
    """The trial that it is or was on."""
    restores: Count | None = None
    """The generation whose knobs it brings back."""


class MeasuredEffect(Message):
    """Median update seconds over the steps before and after a generation was applied, on rank 0."""

    steps_before: Count
    steps_after: Count
    update_seconds_before: Seconds
    update_seconds_after: Seconds


class KnobPatch(Message):
    """Body of `PATCH /v1/runs/{run}/knobs`."""

    changes: Annotated[KnobChanges, Field(min_length=1, max_length=16)]
    reason: Text = ""
    canary: CanaryRequest | None = None
    """Keep it only if it does no harm."""


class PredictedUpdate(Message):
    """What the simulator expects of an update under some knobs, once they have settled."""

    update_seconds: Seconds
    low_seconds: Seconds | None = None
    high_seconds: Seconds | None = None
    """Where 9 of 10 updates will be, by how far predictions of the present knobs were off; None after too few steps."""
    stalls: dict[Label, Seconds]
    """Seconds in which nothing computes, by cause."""
    lane_bytes: dict[Label, Count]
    """Bytes of one step on the link and on the paths, by lane."""
    host_memory_bytes: dict[Label, Count]
    """By kind: `state` (with paths, the host cache), `mirror`, `gradient`, `slot`."""
    device_memory_bytes: Count
    """State of residents, and staging slots."""
    bound_seconds: Seconds
    """These knobs cannot go below that on this machine."""
    bound_by: Label
    """The lane, or the path, that decides the bound."""


class KnobPreview(Message):
    """Answer to a PATCH with `dry_run=true`. Predictions are None until the run has measured its rates."""

    run: RunName
    generation: Count
    before: KnobChanges
    after: KnobChanges
    changed: KnobChanges
    predicted_update_seconds_before: Seconds | None = None
    predicted_update_seconds_after: Seconds | None = None
    predicted_before: PredictedUpdate | None = None
    predicted_after: PredictedUpdate | None = None
    predicted_phase_seconds_after: dict[Label, Seconds] = {}
    """Of all phases; those that knobs do not change are as they were measured, medians of the last steps."""
    error_ratio: Seconds | None = None
    """How far the prediction of the present knobs is off what was measured, as a share of that: the same must be
    expected of this one."""
    no_prediction: Text = ""
    """Why there is none, as a sentence."""
    no_room: Text = ""
    """Which path cannot hold what these knobs give it, as a sentence; others take the rest, or it is refused."""


class Advice(Message):
    """What the model would choose for the lead rank, whether its knobs are pinned or not; nobody applies it."""

    run: RunName
    changes: KnobChanges = {}
    """Empty when nothing is predicted to gain enough."""
    predicted_update_seconds_now: Seconds | None = None
    predicted_update_seconds_then: Seconds | None = None
    sentence: Text
    """The change with its figures, or why there is none."""


class RankView(Message):
    rank: Rank
    agent: Label
    host: Label
    pid: Count
    device_kind: DeviceKind
    metrics_address: str
    liveness: Liveness
    last_seen: float
    started_at: float
    phase: Label
    step: Count
    applied_generation: Count
    effective: KnobChanges
    last_step: StepReport | None = None
    predicted_update_seconds: Seconds | None = None
    """What the rank's simulator expects of the next update; None until it has measured its rates."""
    device_memory_bytes: Count | None = None
    """What its device has in all; None where that is not known."""


class RunTotals(Message):
    """One step over all ranks that are there: the newest that each of them has told. Times are the slowest rank's."""

    step: Count
    ranks: Count
    step_seconds: Seconds
    """Forward, backward and update."""
    update_seconds: Seconds
    slowest_rank: Rank
    """The one whose step took longest."""
    exposed_seconds: Seconds
    tokens: Count | None = None
    """Sums over ranks, as all that follow; None where no rank tells."""
    link_bytes: dict[Label, Count] = {}
    """By direction."""
    path_bytes: dict[Label, CountBy] = {}
    """By path and operation."""
    host_memory_bytes: dict[Label, Count] = {}
    """By kind."""
    update_params: CountBy = {}
    """By processor."""


class RunView(Message):
    run: RunName
    liveness: Liveness
    """The worst of its ranks; finished when all said goodbye."""
    device_kind: DeviceKind
    world_size: Count
    step: Count
    generation: Count
    started_at: float
    last_seen: float
    paths: tuple[str, ...] = ()
    """Names of the storage paths of its ranks."""
    totals: RunTotals | None = None
    """None until all ranks have told of one step."""
    ranks: tuple[RankView, ...]


class StepsView(Message):
    """The newest steps of one rank, oldest first."""

    run: RunName
    rank: Rank
    steps: tuple[StepReport, ...]


class TimelinesView(Message):
    """The steps of one rank whose timelines the daemon has, oldest first."""

    run: RunName
    rank: Rank
    steps: tuple[int, ...]


class AuditRow(Message):
    id: Count
    timestamp: float
    actor: Label
    action: Label
    run: str
    generation: Count | None = None
    before: KnobChanges = {}
    after: KnobChanges = {}
    reason: Text = ""
    effect: Text = ""


class AlertView(Message):
    """The newest word of Alertmanager on one alert. `run` is empty for those that concern none."""

    run: Label
    fingerprint: Label
    """Alertmanager's name for this set of labels."""
    alert: Label
    state: AlertState
    severity: Label = ""
    summary: Text = ""
    description: Text = ""
    knob: Label = ""
    """What to turn; `none` where no knob helps."""
    runbook_url: Annotated[str, Field(max_length=500)] = ""
    labels: Annotated[dict[str, str], Field(max_length=64)] = {}
    starts_at: float
    ends_at: float | None = None
    received_at: float
    """When the daemon was told of it last."""


class AlertReceipt(Message):
    """Answer to `POST /v1/alerts`: how many alerts of the message were news, and what the others were."""

    changed: Count
    repeated: Count
    late: Count
    unknown_run: Count


class Event(Message):
    """One server-sent event of a run: `kind` is report, generation, agent, alert."""

    id: Count
    kind: Label
    run: RunName
    timestamp: float
    data: dict[str, Any]


class Problem(BaseModel):
    """RFC 9457 problem details; `knob`, `rank` and `bounds` where they apply."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


class SdTarget(Message):
    """One entry of Prometheus HTTP service discovery."""

    targets: tuple[str, ...]
    labels: dict[str, str]


for _model in (StepReport, KnobsView, GenerationView):
    _model.model_rebuild()
