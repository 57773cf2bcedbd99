"""Between a rank and the daemon: it says hello, reports and votes, and is told which knobs to run with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from tidegate.wire.base import (
    AgentId,
    Count,
    DeviceKind,
    Duration,
    Flag,
    KnobChanges,
    Label,
    Message,
    Moment,
    PathName,
    Rank,
    RunName,
    Seconds,
    Share,
    Speed,
    Text,
    Whole,
)
from tidegate.wire.step import StepReport
from tidegate.wire.timeline import TimelineView

PROTOCOL_VERSION = 2
MAX_SUBGROUPS = 100_000
"""Of one rank: the daemon asks the simulator about each."""
MAX_LANES = 256
"""Of one rank: two for each path, and a few."""
MAX_KNOB_CHARACTERS = 6_000
"""Of all knobs that a rank tells, names and values together: the daemon keeps them for each rank."""


def _check_knobs(knobs: KnobChanges) -> KnobChanges:
    if (length := sum(len(name) + len(str(value)) for name, value in knobs.items())) > MAX_KNOB_CHARACTERS:
        raise ValueError(
            f"names and values have {length:,} characters in all, {MAX_KNOB_CHARACTERS:,} at most: tell fewer knobs"
        )
    return knobs


ToldKnobs = Annotated[KnobChanges, AfterValidator(_check_knobs)]


class SubgroupSizes(Message):
    """What the simulator needs of a rank's subgroups, grouped by equal size."""

    numel: Count
    count: Annotated[int, Field(strict=True, ge=0, le=MAX_SUBGROUPS)]
    weight_bytes: Count
    grad_bytes: Count
    state_bytes: Count


class Rates(Message):
    """The rank's live rate card: bytes per second and parameters per second; None where nothing was measured yet."""

    h2d_bytes_per_second: Speed | None = None
    d2h_bytes_per_second: Speed | None = None
    cpu_params_per_second: Speed | None = None
    device_params_per_second: Speed | None = None
    norm_params_per_second: Speed | None = None
    overhead_seconds: Duration | None = None
    step_seconds: Duration | None = None
    paths: Annotated[dict[Label, Annotated[dict[Label, Speed | None], Field(max_length=16)]], Field(max_length=64)] = {}
    op_seconds: Annotated[dict[Label, Duration], Field(max_length=MAX_LANES)] = {}
    """What each op of a lane takes however small it is."""
    keeps: Annotated[
        dict[Label, Annotated[dict[Label, Share], Field(max_length=MAX_LANES)]], Field(max_length=MAX_LANES)
    ] = {}
    """Share of its speed that a lane keeps while another works, by lane and other; see `RateCard`."""


class ProcessId(Message):
    """One process among all that ever ran anywhere: whoever finds another start time under its pid, in the same PID
    namespace of the same machine, knows that it has ended."""

    boot: Label
    """The kernel's id of this start of the machine."""
    namespace: Label
    """The PID namespace, as /proc/self/ns/pid names it: containers have their own."""
    pid: Count
    """As processes of that namespace see it."""
    started: Count
    """Clock ticks after the start of the machine."""


class AgentHello(Message):
    """Registers one rank of a run."""

    protocol: Whole = PROTOCOL_VERSION
    agent: AgentId
    """A random id that the agent made; the same for its whole life, reconnections included."""
    run: RunName
    rank: Rank
    world_size: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    host: Label
    pid: Count
    device_kind: DeviceKind
    metrics_address: Annotated[str, Field(max_length=300)]
    """host:port of this rank's /metrics, as other machines reach it; empty when it exports none."""
    knobs: ToldKnobs
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
    started_at: Moment
    process: ProcessId | None = None
    """None where the system does not say, and from agents that do not know this field."""
    replaces: Label | None = None
    """The agent that holds the rank and is known to have ended: the rank is taken over although its lease holds."""

    @model_validator(mode="after")
    def _check_subgroups(self) -> AgentHello:
        if (count := sum(sizes.count for sizes in self.subgroups)) > MAX_SUBGROUPS:
            raise ValueError(f"subgroups are {count:,} in all, {MAX_SUBGROUPS:,} at most: make them larger")
        return self


class Holder(Message):
    """The agent that holds a rank, as the problem `rank-taken` names it."""

    agent: Label
    host: Label
    pid: Count
    process: ProcessId | None = None


class Applied(Message):
    """A rank has applied a generation; `step` is the first step that ran with it."""

    generation: Count
    step: Count


class AgentReport(Message):
    """What a rank says about itself, at most once a second; also renews its lease."""

    timestamp: Moment
    step: Count
    phase: Label
    """The phase the rank is in now."""
    generation: Count
    """The newest generation that this rank has applied."""
    applied: Applied | None = None
    """What it has applied since its last report."""
    effective: ToldKnobs
    """What `auto` stands for at present; pinned knobs as they are."""
    rates: Rates | None = None
    steps: Annotated[tuple[StepReport, ...], Field(max_length=256)] = ()
    """The steps finished since the last report (the newest 256)."""
    timeline: TimelineView | None = None
    predicted_update_seconds: Duration | None = None
    finished: Flag = False


class Vote(Message):
    """A rank's answer to a proposed generation."""

    generation: Count
    can: Flag
    reason: Text = ""
    """Why not, with figures."""


class Directive(Message):
    """What the daemon wants of a rank now.

    `committed` is the newest generation that all live ranks said yes to, with its knobs: apply it at the next step
    boundary. `proposed`, when set, wants a vote.
    """

    committed: Count
    committed_knobs: KnobChanges
    proposed: Count | None = None
    proposed_knobs: KnobChanges | None = None


LeaseSeconds = Annotated[float, Field(strict=True, gt=0, le=86_400, allow_inf_nan=False)]


class Lease(Message):
    """Answer to AgentHello and to every report: how long the daemon believes in this rank without a word from it."""

    lease_seconds: LeaseSeconds
    directive: Directive
    report_seconds: Seconds | None = None
    """How often the daemon wants to hear of it while a canary is judged; None leaves it to the rank."""
