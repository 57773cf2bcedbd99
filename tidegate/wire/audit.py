"""Messages of the audit log: who made which change, and why."""

from __future__ import annotations

from tidegate.wire.base import Count, KnobChanges, Label, Message, Text


class AuditRow(Message):
    id: Count
    timestamp: float
    actor: Label
    action: Label
    run: Label
    generation: Count | None = None
    before: KnobChanges = {}
    after: KnobChanges = {}
    reason: Text = ""
    effect: Text = ""
