"""The alerts that Alertmanager tells of: each change is a row of the audit log, and the log is where they live.

What is known after a restart is read from the log again, so there is no second truth. In memory, and on screens, is a
bounded number for each run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from tidegate.daemon.store import AuditNote, Store
from tidegate.wire.alert import AlertState, AlertView
from tidegate.wire.audit import AuditRow
from tidegate.wire.base import KnobChanges

FIRING_KEPT: Final = 200
RESOLVED_KEPT: Final = 50
ROWS_READ: Final = 5_000
"""Of the audit log, at the start."""
_ACTIONS: Final[dict[str, AlertState]] = {f"alert_{state}": state for state in get_args(AlertState)}
_LABEL: Final = "label_"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a message: `changed` alerts were written down, `repeated` ones were known, `late` ones are older
    than what is known."""

    changed: tuple[AlertView, ...] = ()
    repeated: int = 0
    late: int = 0


class AlertBook:
    """The newest word on each alert, by run; the run of alerts that concern none is the empty text."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[str, dict[str, AlertView]] = {}
        for row in store.audit_of_actions(tuple(_ACTIONS), ROWS_READ):
            try:
                self._keep(_of_row(row))
            except (KeyError, ValueError) as error:
                log.error("row %d of the audit log is no alert, and is left out: %s", row.id, error)

    def of(self, run: str, state: AlertState | None = None) -> list[AlertView]:
        """The alerts of a run, oldest first."""
        return _oldest_first(self._runs.get(run, {}).values(), state)

    def everywhere(self, state: AlertState | None = None) -> list[AlertView]:
        """The alerts of all runs and of none, oldest first."""
        return _oldest_first((alert for of_run in self._runs.values() for alert in of_run.values()), state)

    def take(self, alerts: Sequence[AlertView], actor: str) -> Taken:
        """Writes down what is new, all of it or nothing. Saying it again is fine."""
        known = {(a.run, a.fingerprint): a for of_run in self._runs.values() for a in of_run.values()}
        heard, changed, repeated, late = [], [], 0, 0
        for alert in alerts:
            key = (alert.run, alert.fingerprint)
            before = known.get(key)
            if before is not None and before.starts_at > alert.starts_at:
                late += 1
                continue
            if before is not None and (before.state, before.starts_at) == (alert.state, alert.starts_at):
                repeated += 1
            else:
                changed.append(alert)
            known[key] = alert
            heard.append(alert)
        if changed:
            self._store.save("", notes=[_note(alert, actor) for alert in changed])
        for alert in heard:
            self._keep(alert)
        return Taken(tuple(changed), repeated, late)

    def _keep(self, alert: AlertView) -> None:
        of_run = self._runs.setdefault(alert.run, {})
        of_run[alert.fingerprint] = alert
        for state, kept in (("firing", FIRING_KEPT), ("resolved", RESOLVED_KEPT)):
            for old in _all_but_newest((a for a in of_run.values() if a.state == state), kept):
                del of_run[old.fingerprint]


def _oldest_first(alerts: Iterable[AlertView], state: AlertState | None) -> list[AlertView]:
    return sorted((a for a in alerts if state in (None, a.state)), key=lambda a: (a.starts_at, a.fingerprint))


def _all_but_newest(alerts: Iterable[AlertView], kept: int) -> list[AlertView]:
    return sorted(alerts, key=lambda a: (a.ends_at or a.starts_at, a.fingerprint))[:-kept]


def _note(alert: AlertView, actor: str) -> AuditNote:
    facts: KnobChanges = {
        "alert": alert.alert,
        "severity": alert.severity,
        "knob": alert.knob,
        "runbook_url": alert.runbook_url,
        "fingerprint": alert.fingerprint,
        "starts_at": alert.starts_at,
        **{f"{_LABEL}{name}": value for name, value in alert.labels.items()},
    }
    if alert.ends_at is not None:
        facts["ends_at"] = alert.ends_at
    return AuditNote(
        timestamp=alert.received_at,
        actor=actor,
        action=f"alert_{alert.state}",
        run=alert.run,
        after=facts,
        reason=alert.summary,
        effect=alert.description,
    )


def _of_row(row: AuditRow) -> AlertView:
    facts = row.after
    ends_at = facts.get("ends_at")
    return AlertView(
        run=row.run,
        fingerprint=str(facts["fingerprint"]),
        alert=str(facts["alert"]),
        state=_ACTIONS[row.action],
        severity=str(facts["severity"]),
        summary=row.reason,
        description=row.effect,
        knob=str(facts["knob"]),
        runbook_url=str(facts["runbook_url"]),
        labels={name.removeprefix(_LABEL): str(value) for name, value in facts.items() if name.startswith(_LABEL)},
        starts_at=float(facts["starts_at"]),
        ends_at=float(ends_at) if ends_at is not None else None,
        received_at=row.timestamp,
    )
