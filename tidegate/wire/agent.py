"""Messages between a rank's agent and the daemon: registration, reports, votes, and directives with knobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

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
from tidegate.wire.evidence import ModelEvidence, SizeRuns
from tidegate.wire.step import StepReport
from tidegate.wire.timeline import TimelineView

PROTOCOL_VERSION = 2
MAX_LANES = 256
"""Largest number of lanes of one rank: two for each storage path, and a few others."""
MAX_KNOB_CHARACTERS = 6_000
"""Largest number of characters of all knobs in one message of a rank, names and values together. It is limited, because
the daemon keeps the knobs of each rank in memory."""


def _check_knobs(knobs: KnobChanges) -> KnobChanges:
    if (length := sum(len(name) + len(str(value)) for name, value in knobs.items())) > MAX_KNOB_CHARACTERS:
        raise ValueError(
            f"the knobs' names and values have {length:,} characters in all, at most {MAX_KNOB_CHARACTERS:,} are "
            "allowed: send fewer knobs"
        )
    return knobs


ReportedKnobs = Annotated[KnobChanges, AfterValidator(_check_knobs)]


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
    """Fixed seconds per op, by lane."""
    keeps: Annotated[
        dict[Label, Annotated[dict[Label, Share], Field(max_length=MAX_LANES)]], Field(max_length=MAX_LANES)
    ] = {}
    """Interference factors: speed of a lane while another works, divided by its speed alone; see `RateCard`."""


class ProcessId(Message):
    """Identity of one process, unique over all machines and times. If, in the same PID namespace of the same machine, a
    process with this pid has another start time, then the identified process has ended."""

    boot: Label
    """The kernel's id of this start of the machine."""
    namespace: Label
    """The PID namespace, as /proc/self/ns/pid names it: containers have their own."""
    pid: Count
    """The process id within that namespace."""
    started: Count
    """Start time of the process, in clock ticks after the start of the machine."""


class AgentHello(Message):
    """Hello: the message with which an agent registers its rank of a run with the daemon."""

    protocol: Whole = PROTOCOL_VERSION
    agent: AgentId
    """A random id that the agent has chosen; it stays the same when the agent connects again."""
    run: RunName
    rank: Rank
    world_size: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    host: Label
    pid: Count
    device_kind: DeviceKind
    metrics_address: Annotated[str, Field(max_length=300)]
    """host:port of this rank's /metrics, as other machines reach it; empty when it exports none."""
    knobs: ReportedKnobs
    """Start-up settings: generation 0 of a new run."""
    reset_knobs: Flag = False
    """Whether the knobs of the script replace desired knobs that the daemon has stored for this run."""
    subgroups: SizeRuns = ()
    num_slots: Annotated[int, Field(strict=True, ge=1, le=64)] = 2
    device_memory_bytes: Count | None = None
    """Memory capacity of the device; None where that is not known."""
    host_slots: Annotated[int, Field(strict=True, ge=1, le=1024)] = 3
    """Number of staging slots in host memory for each storage path."""
    gradients: Literal["keep", "release"] = "keep"
    policy: Label = "interleaved"
    """Scheduling policy of plans; predictions support only `interleaved`."""
    paths: Annotated[tuple[PathName, ...], Field(max_length=64)] = ()
    """Names of the storage paths, in their order; a run without paths has no knobs of paths."""
    started_at: Moment
    process: ProcessId | None = None
    """Identity of the agent's process; None if the operating system does not provide it, or from older agents."""
    replaces: Label | None = None
    """Id of the agent that has held this rank until now, if the process of that agent is known to have ended. Then the
    new agent takes over the rank at once, and does not wait until the other agent has been silent for longer than its
    lease."""


class Holder(Message):
    """The agent that holds a rank: part of the error response with which another agent is refused that rank
    (`rank-taken`)."""

    agent: Label
    host: Label
    pid: Count
    process: ProcessId | None = None


class Applied(Message):
    """The generation that a rank has applied, and the first step that ran with it (`step`)."""

    generation: Count
    step: Count


class AgentReport(Message):
    """Status report of a rank, about once a second; more often if the daemon asks for it (`Lease.report_seconds`). Each
    report makes the daemon treat the rank as live for another `lease_seconds`."""

    timestamp: Moment
    step: Count
    phase: Label
    """The present phase of the rank."""
    generation: Count
    """The newest generation that this rank has applied."""
    applied: Applied | None = None
    """The generation that the rank has applied since its last report; None if there is none."""
    effective: ReportedKnobs
    """The values that the rank uses: for an `auto` knob the tuner's value, for a pinned knob its own value."""
    rates: Rates | None = None
    evidence: ModelEvidence | None = None
    """The other inputs of predictions for this rank; None from an agent of the version before."""
    steps: Annotated[tuple[StepReport, ...], Field(max_length=256)] = ()
    """The steps finished since the last report (the newest 256)."""
    timeline: TimelineView | None = None
    predicted_update_seconds: Duration | None = None
    finished: Flag = False


class Vote(Message):
    """A rank's vote on a proposed generation: whether it can apply the knobs."""

    generation: Count
    can: Flag
    reason: Text = ""
    """The reason why the rank cannot apply the proposed knobs, with figures; empty if it can."""


class Directive(Message):
    """Present instructions of the daemon for a rank.

    `committed` is the newest generation that all live ranks have accepted, with its knobs: apply it at the next step
    boundary. `proposed`, when set, is a generation on which the rank must vote.
    """

    committed: Count
    committed_knobs: KnobChanges
    proposed: Count | None = None
    proposed_knobs: KnobChanges | None = None


LeaseSeconds = Annotated[float, Field(strict=True, gt=0, le=86_400, allow_inf_nan=False)]


class Lease(Message):
    """Answer to the registration of a rank (AgentHello) and to each of its reports. `lease_seconds`: for how long the
    daemon then treats the rank as live without a report."""

    lease_seconds: LeaseSeconds
    directive: Directive
    report_seconds: Seconds | None = None
    """Requested seconds between reports while a canary (a change of knobs on trial) has no verdict; None: the rank
    decides."""


AgentRefusal = Literal["no-token", "wrong-token", "expired-token", "revoked-token", "wrong-scope", "wrong-run"]
"""Why the daemon refuses an agent: the type of the problem in its answer."""

_WHY_REFUSED: Final[Mapping[AgentRefusal, str]] = {
    "no-token": "they send no token",
    "wrong-token": "the daemon does not know their token",
    "expired-token": "their token has expired",
    "revoked-token": "their token was revoked",
    "wrong-scope": "their token is no agent token",
    "wrong-run": "their token is for another run",
}


class RefusedAgents(Message):
    """Agents at one address that the daemon refuses for one reason."""

    address: Label
    reason: AgentRefusal
    since: float

    @property
    def sentence(self) -> str:
        return (
            f"Agents at {self.address} are refused, because {_WHY_REFUSED[self.reason]}: their runs are not shown. "
            "Start these jobs with a valid agent token: TIDEGATE_AGENT_TOKEN, or agent.token of the daemon's state "
            "directory."
        )
