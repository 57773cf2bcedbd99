"""Alerts received from Alertmanager: the latest state of each alert is stored, each change is a row of the audit log.

The number of stored alerts is limited for each token that reports them, in each run and in all runs. Of firing alerts
the most severe are kept; of equally severe alerts those that have fired longest; with the same start those that were
received first. Of resolved alerts the newest are kept. So the alerts of one token cannot remove alerts of another
token, and a new alert cannot remove an equally severe alert that has fired longer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tidegate.daemon.storage.alert_table import KnownAlert
from tidegate.daemon.storage.records import AuditNote
from tidegate.daemon.storage.store import Store
from tidegate.wire.alert import SEVERITIES, AlertState, AlertView
from tidegate.wire.base import KnobChanges

FIRING_KEPT: Final = 200
"""Maximum number of firing alerts that are kept for one token in one run."""
RESOLVED_KEPT: Final = 50
"""Maximum number of resolved alerts that are kept for one token in one run."""
KEPT_OF_A_TOKEN: Final = 5_000
"""Maximum number of alerts that are kept for one token in all runs, for firing and for resolved alerts each."""
RESOLVED_SECONDS: Final = 7 * 86_400.0
"""A resolved alert is kept for this time after the daemon last received it."""
_LABEL: Final = "label_"
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class AlertResult:
    """Result of a webhook message: how many of its alerts were stored and why the others were not.

    changed: alerts with a new state, which were stored. repeated: alerts whose state was known. late: alerts that are
    older than the stored state. over_quota: new alerts that were not stored, and stored firing alerts that were
    removed, because the token is over its quota.
    """

    changed: tuple[AlertView, ...] = ()
    repeated: int = 0
    late: int = 0
    over_quota: int = 0


class AlertRegistry:
    """The latest state of each alert, by run and fingerprint; an alert without a run has an empty run name."""

    def __init__(self, store: Store, wall: Callable[[], float] = time.time) -> None:
        self._store = store
        self._wall = wall
        self._known = {alert.key: alert for alert in store.alerts.all()}
        """Known alerts by run and fingerprint. Changed alerts are moved to the end: if there are too many equally
        important alerts, those at the beginning are kept."""

    def of(self, run: str, state: AlertState | None = None) -> list[AlertView]:
        """The alerts of a run, most severe first; with `state`, only the alerts in this state."""
        return self._shown(state, lambda alert: alert.view.run == run)

    def everywhere(self, state: AlertState | None = None) -> list[AlertView]:
        """All alerts, with and without a run, most severe first; with `state`, only the alerts in this state."""
        return self._shown(state, lambda _: True)

    def record(self, alerts: Sequence[AlertView], actor: str, owner: str = "") -> AlertResult:
        """Stores the alerts that have changed, in one transaction. Idempotent. `owner`: id of the caller's token."""
        known = dict(self._known)
        changed: list[tuple[AlertView, bool]] = []
        repeated = late = 0
        for alert in alerts:
            key = (alert.run, alert.fingerprint)
            before = known.get(key)
            if before is not None and before.view.starts_at > alert.starts_at:
                late += 1
                continue
            if before and (before.view.state, before.view.starts_at) == (alert.state, alert.starts_at):
                repeated += 1
            else:
                changed.append((alert, before is not None))
                known.pop(key, None)  # so that it becomes the last one in the order
            known[key] = KnownAlert(alert, before.owner if before else owner)
        oldest = self._wall() - RESOLVED_SECONDS
        gone = {alert.key for alert in known.values() if _is_old(alert, oldest)} | _over_quota(known.values())
        # A change of an alert that was stored is audited even if the alert is no longer kept.
        written = [alert for alert, was_known in changed if was_known or (alert.run, alert.fingerprint) not in gone]
        kept = {key: alert for key, alert in known.items() if key not in gone}
        displaced = sum(known[key].view.state == "firing" for key in gone & self._known.keys())
        news = dict.fromkeys((alert.run, alert.fingerprint) for alert in written)
        if written or gone & self._known.keys():
            self._store.save(
                "",
                notes=[_note(alert, actor) for alert in written],
                alerts=[kept[key] for key in news if key in kept],
                deleted_alerts=gone & self._known.keys(),
            )
        self._known = kept
        return AlertResult(tuple(written), repeated, late, len(changed) - len(written) + displaced)

    def forget(self, run: str) -> None:
        """Drops the alerts of a deleted run from memory; the store has deleted them together with the run."""
        self._known = {key: alert for key, alert in self._known.items() if alert.view.run != run}

    def _shown(self, state: AlertState | None, wanted: Callable[[KnownAlert], bool]) -> list[AlertView]:
        oldest = self._wall() - RESOLVED_SECONDS
        shown = (alert for alert in self._known.values() if wanted(alert) and not _is_old(alert, oldest))
        ranked = sorted(shown, key=lambda alert: (*_rank(alert), alert.view.fingerprint))
        return [alert.view for alert in ranked if state in (None, alert.view.state)]


def _is_old(alert: KnownAlert, oldest: float) -> bool:
    return alert.view.state == "resolved" and alert.view.received_at < oldest


def _rank(alert: KnownAlert) -> tuple[bool, int, float]:
    """Sort key: firing alerts by severity, then by start; after them resolved alerts, newest first."""
    view = alert.view
    if view.state == "resolved":
        return True, 0, -(view.ends_at or view.starts_at)
    severity = SEVERITIES.index(view.severity) if view.severity in SEVERITIES else len(SEVERITIES)
    return False, severity, view.starts_at


def _over_quota(alerts: Iterable[KnownAlert]) -> set[_Key]:
    """Keys of the alerts that exceed the quota of their token. Among alerts with equal sort key, the ones that come
    first in `alerts` are kept."""
    return set(_iterate_over_quota(sorted(alerts, key=_rank)))


def _iterate_over_quota(ranked: Iterable[KnownAlert]) -> Iterator[_Key]:
    in_run: defaultdict[tuple[str, str, AlertState], int] = defaultdict(int)
    everywhere: defaultdict[tuple[str, AlertState], int] = defaultdict(int)
    for alert in ranked:
        view = alert.view
        run_key, token_key = (view.run, alert.owner, view.state), (alert.owner, view.state)
        limit = FIRING_KEPT if view.state == "firing" else RESOLVED_KEPT
        if in_run[run_key] >= limit or everywhere[token_key] >= KEPT_OF_A_TOKEN:
            yield alert.key
            continue
        in_run[run_key] += 1
        everywhere[token_key] += 1


def _note(alert: AlertView, actor: str) -> AuditNote:
    """The audit row of a changed alert."""
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
