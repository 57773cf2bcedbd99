"""Filter and text of audit rows: selects the rows to show, and describes each row's change. It draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tidegate.dashboard.data import knob_edits
from tidegate.knobs.knobs import same
from tidegate.wire.audit import AuditRow

ALERT: Final = "alert_"


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    """A filter of audit rows; an empty filter accepts all rows. `text`: words that a row must contain, ignoring
    case."""

    text: str = ""
    actions: frozenset[str] = frozenset()
    actor: str = ""

    def takes(self, row: AuditRow) -> bool:
        if self.actions and row.action not in self.actions:
            return False
        if self.actor and row.actor != self.actor:
            return False
        return all(word in _row_text(row) for word in self.text.lower().split())


def filtered(rows: Sequence[AuditRow], wanted: AuditFilter) -> list[AuditRow]:
    """The rows that the filter accepts, newest first. rows: oldest first."""
    return [row for row in reversed(rows) if wanted.takes(row)]


def action_text(action: str) -> str:
    """An action as text: `alert_firing` becomes `alert firing`."""
    return action.replace("_", " ")


def change(row: AuditRow) -> str:
    """The change of an audit row as text: the knobs that differ; for an alert its name and the knob to turn."""
    if row.action.startswith(ALERT):
        knob = str(row.after.get("knob", ""))
        return f"{row.after.get('alert', '')}" + (f", turn {knob}" if knob not in ("", "none") else "")
    different = {n: v for n, v in row.after.items() if n not in row.before or not same(n, v, row.before[n])}
    return knob_edits.describe(different, row.before) if different and (row.before or not row.generation) else ""


def _row_text(row: AuditRow) -> str:
    generation = f"generation {row.generation}" if row.generation is not None else ""
    return " ".join((row.actor, action_text(row.action), generation, change(row), row.reason, row.effect)).lower()
