"""The alerts that Alertmanager tells of: the newest word on each is stored, and each change is a row of the audit log.

A bounded number is kept, for each run and each token that tells: the worst of those that fire, of the equally bad those
that have fired longest, of those with one start the first that were told; and the newest that were resolved. So what
one token tells hides nothing of another's, and what comes later nothing that is as bad.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tidegate.daemon.storage.alert_table import KnownAlert
from tidegate.daemon.storage.store import AuditNote, Store
from tidegate.wire.alert import SEVERITIES, AlertState, AlertView
from tidegate.wire.base import KnobChanges

FIRING_KEPT: Final = 200
RESOLVED_KEPT: Final = 50
"""Of one token in one run."""
KEPT_OF_A_TOKEN: Final = 5_000
"""In all runs, of each of the two."""
RESOLVED_SECONDS: Final = 7 * 86_400.0
"""For so long one that was resolved is kept after the daemon was told of it last."""
_LABEL: Final = "label_"
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a message: `changed` alerts were written down, `repeated` ones were known, `late` ones are older
    than what is known, for those `over_quota` the token has no room: new ones are not written down, known ones that
    fire are kept no longer."""

    changed: tuple[AlertView, ...] = ()
    repeated: int = 0
    late: int = 0
    over_quota: int = 0


class AlertBook:
    """The newest word on each alert, by run and fingerprint; the run of alerts that concern none is the empty text."""

    def __init__(self, store: Store, wall: Callable[[], float] = time.time) -> None:
        self._store = store
        self._wall = wall
        self._known = {alert.key: alert for alert in store.alerts.all()}
        """In the order in which they began to fire or were resolved, as far as this process was told."""

    def of(self, run: str, state: AlertState | None = None) -> list[AlertView]:
        """The alerts of a run, worst first."""
        return self._shown(state, lambda alert: alert.view.run == run)

    def everywhere(self, state: AlertState | None = None) -> list[AlertView]:
        """The alerts of all runs and of none, worst first."""
        return self._shown(state, lambda _: True)

    def take(self, alerts: Sequence[AlertView], actor: str, owner: str = "") -> Taken:
        """Writes down what is new, all of it or nothing. Saying it again is fine. `owner`: id of the caller's token."""
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
                known.pop(key, None)  # it is the last one told now
            known[key] = KnownAlert(alert, before.owner if before else owner)
        oldest = self._wall() - RESOLVED_SECONDS
        gone = {alert.key for alert in known.values() if _is_old(alert, oldest)} | _over_quota(known.values())
        # What becomes of an alert that was written down is written down, too, whether or not it is kept.
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
        return Taken(tuple(written), repeated, late, len(changed) - len(written) + displaced)

    def forget(self, run: str) -> None:
        """The run is deleted, and its alerts were with it."""
        self._known = {key: alert for key, alert in self._known.items() if alert.view.run != run}

    def _shown(self, state: AlertState | None, wanted: Callable[[KnownAlert], bool]) -> list[AlertView]:
        oldest = self._wall() - RESOLVED_SECONDS
        found = (alert for alert in self._known.values() if wanted(alert) and not _is_old(alert, oldest))
        ranked = sorted(found, key=lambda alert: (*_rank(alert), alert.view.fingerprint))
        return [alert.view for alert in ranked if state in (None, alert.view.state)]


def _is_old(alert: KnownAlert, oldest: float) -> bool:
    return alert.view.state == "resolved" and alert.view.received_at < oldest


def _rank(alert: KnownAlert) -> tuple[bool, int, float]:
    """Those that fire first: by severity, then those that have fired longest. Then the others, newest first."""
    view = alert.view
    if view.state == "resolved":
        return True, 0, -(view.ends_at or view.starts_at)
    severity = SEVERITIES.index(view.severity) if view.severity in SEVERITIES else len(SEVERITIES)
    return False, severity, view.starts_at


def _over_quota(alerts: Iterable[KnownAlert]) -> set[_Key]:
    """Those for which their token has no room. Of equal ones the first given stay."""
    return set(_without_room(sorted(alerts, key=_rank)))


def _without_room(ranked: Iterable[KnownAlert]) -> Iterator[_Key]:
    in_run: defaultdict[tuple[str, str, AlertState], int] = defaultdict(int)
    everywhere: defaultdict[tuple[str, AlertState], int] = defaultdict(int)
    for alert in ranked:
        view = alert.view
        here, all_of_it = (view.run, alert.owner, view.state), (alert.owner, view.state)
        kept = FIRING_KEPT if view.state == "firing" else RESOLVED_KEPT
        if in_run[here] >= kept or everywhere[all_of_it] >= KEPT_OF_A_TOKEN:
            yield alert.key
            continue
        in_run[here] += 1
        everywhere[all_of_it] += 1


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
