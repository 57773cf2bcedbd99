"""What the daemon stores of runs, generations, ranks and the audit log: records, and their conversion to rows and back.

Each function `…_of(row)` raises for a row that cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from pydantic import Field, TypeAdapter

from tidegate.daemon.decisions.generations import Generation
from tidegate.daemon.storage.schema import AgentRow, AuditEntry, GenerationRow, RunRow
from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentHello, Rates
from tidegate.wire.audit import AuditRow
from tidegate.wire.base import Duration, Finite, KnobChanges, Label, Liveness, Message, RunName
from tidegate.wire.evidence import ModelEvidence
from tidegate.wire.run import Breakdown


@dataclass(frozen=True, kw_only=True)
class AgentRecord:
    """The agent of one rank as it is stored."""

    hello: AgentHello
    liveness: Liveness
    last_seen: float
    step: int
    applied_generation: int
    last_report: dict[str, Any]
    """Fields of the agent's newest report that do not belong to a step, such as its rates: see `Member.last_report`.
    Stored in the column `told`."""
    owner: str = ""
    """Id of the token that the agent used; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class AuditNote:
    """A new row of the audit log, which has no number yet."""

    timestamp: float
    actor: str
    action: str
    run: str
    generation: int | None = None
    before: KnobChanges | None = None
    after: KnobChanges | None = None
    reason: str = ""
    effect: str = ""


class LastReport(Message):
    """The fields of an agent's newest report that belong to no step (`Member.last_report`), as they are stored."""

    phase: Label = "other"
    effective: KnobChanges = Field(default_factory=dict)
    predicted_update_seconds: Duration | None = None
    rates: Rates | None = None
    evidence: ModelEvidence | None = None


class StoredRun(Message):
    """A row of the table of runs."""

    name: RunName
    created_at: Finite
    breakdown: Breakdown | None = None


_AGENT: Final = TypeAdapter(AgentRecord)
_GENERATION: Final = TypeAdapter(Generation)


def generation_row(run: str, generation: Generation) -> GenerationRow:
    return GenerationRow(run=run, **_GENERATION.dump_python(generation, mode="json"))


def run_of(row: RunRow) -> StoredRun:
    return StoredRun.model_validate(row, from_attributes=True)


def run_row(run: StoredRun) -> RunRow:
    return RunRow(**run.model_dump(mode="json"))


def audit_of(row: AuditEntry) -> AuditRow:
    return AuditRow(**{name: getattr(row, name) for name in AuditRow.model_fields})


def agent_of(row: AgentRow) -> AgentRecord:
    hello = AgentHello.model_validate(row.hello)
    if (hello.run, hello.rank, hello.agent) != (row.run, row.rank, row.agent):
        raise ValueError(
            "run, rank or agent of the stored row differ from those in the registration message that it holds"
        )
    last_report = LastReport.model_validate(row.told or {}).model_dump(exclude_unset=True)
    more = {name: getattr(row, name) for name in ("liveness", "last_seen", "step", "applied_generation")}
    return _AGENT.validate_python({"hello": hello, "last_report": last_report, "owner": row.owner or "", **more})


def generation_of(row: GenerationRow) -> Generation:
    generation = _GENERATION.validate_python({field.name: getattr(row, field.name) for field in fields(Generation)})
    Knobs(**generation.knobs)  # type: ignore[arg-type]  # raises for invalid knobs
    return generation


def agent_row(agent: AgentRecord) -> AgentRow:
    return AgentRow(
        run=agent.hello.run,
        rank=agent.hello.rank,
        agent=agent.hello.agent,
        hello=agent.hello.model_dump(mode="json"),
        liveness=agent.liveness,
        last_seen=agent.last_seen,
        step=agent.step,
        applied_generation=agent.applied_generation,
        told=agent.last_report,
        owner=agent.owner,
    )


def audit_entry(note: AuditNote) -> AuditEntry:
    return AuditEntry(
        timestamp=note.timestamp,
        actor=note.actor,
        action=note.action,
        run=note.run,
        generation=note.generation,
        before=note.before or {},
        after=note.after or {},
        reason=note.reason,
        effect=note.effect,
    )
