"""The audit log as people look through it: what to show of a row, and which rows. Pure: nothing here draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tidegate.dashboard.data import knob_edits
from tidegate.knobs.knobs import SPECS, same
from tidegate.wire.audit import AuditRow
from tidegate.wire.base import KnobChanges

ALERT: Final = "alert_"


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rows to show. Empty: all of them. `text` is looked for in everything that a row says, whatever its case."""

    text: str = ""
    actions: frozenset[str] = frozenset()
    actor: str = ""

    def takes(self, row: AuditRow) -> bool:
        if self.actions and row.action not in self.actions:
            return False
        if self.actor and row.actor != self.actor:
            return False
        return all(word in _said(row) for word in self.text.lower().split())


def chosen(rows: Sequence[AuditRow], wanted: Filter) -> list[AuditRow]:
    """Rows that the filter takes, newest first."""
    return [row for row in reversed(rows) if wanted.takes(row)]


def actions(rows: Iterable[AuditRow]) -> list[str]:
    """The actions that there are, by name."""
    return sorted({row.action for row in rows})


def actors(rows: Iterable[AuditRow]) -> list[str]:
    return sorted({row.actor for row in rows})


def words(action: str) -> str:
    """`alert_firing` as `alert firing`."""
    return action.replace("_", " ")


def change(row: AuditRow) -> str:
    """What is different after it; for alerts which one, and the knob that it names."""
    if row.action.startswith(ALERT):
        knob = str(row.after.get("knob", ""))
        return f"{row.after.get('alert', '')}" + (f", turn {knob}" if knob not in ("", "none") else "")
    different = _different(row.before, row.after) if row.before or not row.generation else {}
    return knob_edits.describe(different, row.before) if different else ""


def _different(before: KnobChanges, after: KnobChanges) -> KnobChanges:
    return {name: value for name, value in after.items() if name not in before or not _same(name, value, before[name])}


def _same(name: str, one: float | int | str, other: float | int | str) -> bool:
    return same(name, one, other) if name in SPECS else one == other


def _said(row: AuditRow) -> str:
    generation = f"generation {row.generation}" if row.generation is not None else ""
    return " ".join((row.actor, words(row.action), generation, change(row), row.reason, row.effect)).lower()
