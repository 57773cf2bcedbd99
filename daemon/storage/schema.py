"""The tables as they are now: what must survive a restart of the daemon. `migrations/` says how they came to be."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Base of all tables; dicts are stored as JSON."""

    type_annotation_map = {dict[str, Any]: JSON, float: Float, str: String(300)}  # noqa: RUF012


class TokenRow(Base):
    """A token's SHA-256 in hex; the token itself is nowhere but with its holder."""

    __tablename__ = "tokens"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str]
    scope: Mapped[str]
    created_at: Mapped[float]
    run: Mapped[str | None]
    """The only run that it opens; None opens all."""
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class RunRow(Base):
    __tablename__ = "runs"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float]


class GenerationRow(Base):
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
    """The generation whose knobs it brings back."""


class AgentRow(Base):
    """The agent that holds a rank, or held it last."""

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
    """What it said last that is in no step: see `Member.told`."""
    owner: Mapped[str | None] = mapped_column(String(64))
    """Id of the token that it came with; None where nobody knows."""


class AlertRow(Base):
    """The newest word on an alert. Bounded: see `control/alerts.py`; the audit log has all changes."""

    __tablename__ = "alerts"
    run: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Empty for those that concern none."""
    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(String(64))
    """Id of the token that told of it first; empty where nobody knows."""
    body: Mapped[dict[str, Any]]


class StepRow(Base):
    """One step of an agent as it was reported. Bounded: see `control/history.py`."""

    __tablename__ = "steps"
    __table_args__ = (Index("steps_by_time", "at"),)
    agent: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[float]
    body: Mapped[str] = mapped_column(Text)
    """JSON."""


class CounterRow(Base):
    """The next number that a counter gives: it never goes back."""

    __tablename__ = "counters"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    next: Mapped[int] = mapped_column(BigInteger)


class QuarantineRow(Base):
    """A row of another table that could not be read: `tidegate doctor --state` has moved it here."""

    __tablename__ = "quarantine"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    at: Mapped[float]
    source: Mapped[str] = mapped_column(String(64))
    """The table that it was in."""
    why: Mapped[str] = mapped_column(Text)
    body: Mapped[str] = mapped_column(Text)
    """JSON: its values by column, those that are no text as hexadecimal digits."""


class AuditEntry(Base):
    """Append-only: the database refuses updates and deletions by trigger."""

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
