"""Database schema: the tables in their present version. `migrations/` has the steps from one version to the next."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Base of all tables; dicts are stored as JSON."""

    type_annotation_map = {dict[str, Any]: JSON, float: Float, str: String(300)}  # noqa: RUF012


class TokenRow(Base):
    """A token, stored as its SHA-256 digest in hex; the token itself is not stored."""

    __tablename__ = "tokens"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str]
    scope: Mapped[str]
    created_at: Mapped[float]
    run: Mapped[str | None]
    """The only run that the token gives access to; None: all runs."""
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class RunRow(Base):
    __tablename__ = "runs"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float]
    breakdown: Mapped[dict[str, Any] | None]
    """How the run broke down: see `Breakdown`; None if it did not, or goes on again."""


class GenerationRow(Base):
    """One generation of a run's desired knobs."""

    __tablename__ = "generations"
    run: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str]
    knobs: Mapped[dict[str, Any]]
    changes: Mapped[dict[str, Any]]
    author: Mapped[str]
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    decided_at: Mapped[float | None]
    outcome: Mapped[str] = mapped_column(Text)
    votes: Mapped[dict[str, Any]]
    applied: Mapped[dict[str, Any]]
    effect: Mapped[dict[str, Any] | None]
    canary: Mapped[dict[str, Any] | None]
    restores: Mapped[int | None]
    """Number of the generation whose knobs this generation restores; None where it is no rollback."""


class AgentRow(Base):
    """The agent that holds a rank now, or held it last."""

    __tablename__ = "agents"
    run: Mapped[str] = mapped_column(String(64), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    agent: Mapped[str]
    hello: Mapped[dict[str, Any]]
    liveness: Mapped[str]
    last_seen: Mapped[float]
    step: Mapped[int] = mapped_column(BigInteger)
    applied_generation: Mapped[int]
    told: Mapped[dict[str, Any] | None]
    """Fields of the agent's last report that belong to no step: see `Member.last_report`."""
    owner: Mapped[str | None] = mapped_column(String(64))
    """Id of the token that the agent used; None if unknown."""


class AlertRow(Base):
    """The latest state of an alert. `control/alerts.py` limits the number of rows; the audit log has all changes."""

    __tablename__ = "alerts"
    run: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Name of the run; empty for an alert without a run."""
    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(String(64))
    """Id of the token that first reported the alert; empty if unknown."""
    body: Mapped[dict[str, Any]]


class StepRow(Base):
    """One step of an agent as it was reported. `control/step_writer.py` limits the number of rows."""

    __tablename__ = "steps"
    __table_args__ = (Index("steps_by_time", "at"),)
    agent: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[float]
    """Time at which the daemon received the step, in seconds since the epoch."""
    body: Mapped[str] = mapped_column(Text)
    """The `StepReport` in JSON."""


class CounterRow(Base):
    """A persistent counter: `next` is the number that it gives next, and never decreases."""

    __tablename__ = "counters"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    next: Mapped[int] = mapped_column(BigInteger)


class QuarantineRow(Base):
    """A row of another table that could not be read, moved here by `tidegate doctor --state`."""

    __tablename__ = "quarantine"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    at: Mapped[float]
    source: Mapped[str] = mapped_column(String(64))
    """The table that the row was in."""
    why: Mapped[str] = mapped_column(Text)
    body: Mapped[str] = mapped_column(Text)
    """The row's values by column in JSON; bytes as hexadecimal digits."""


class AuditEntry(Base):
    """A row of the audit log. Append-only: database triggers refuse updates and deletions."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_run", "run", "id"),)
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    timestamp: Mapped[float]
    actor: Mapped[str]
    action: Mapped[str]
    run: Mapped[str]
    generation: Mapped[int | None]
    before: Mapped[dict[str, Any]]
    after: Mapped[dict[str, Any]]
    reason: Mapped[str] = mapped_column(Text)
    effect: Mapped[str] = mapped_column(Text)
