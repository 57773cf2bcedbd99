"""Table of alerts: the latest state of each stored alert, and the token that first reported it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from tidegate.daemon.storage.row_reader import RowReader
from tidegate.daemon.storage.schema import AlertRow
from tidegate.wire.alert import AlertView


@dataclass(frozen=True, slots=True)
class KnownAlert:
    """The latest state of one alert. `owner`: id of the token that first reported it; empty if unknown."""

    view: AlertView
    owner: str

    @property
    def key(self) -> tuple[str, str]:
        return self.view.run, self.view.fingerprint


class AlertTable:
    """The alerts of one database."""

    def __init__(self, reading: sessionmaker[Session], row_reader: RowReader) -> None:
        """`reading`: makes sessions that only read. `row_reader`: leaves out rows that cannot be read, and remembers
        their keys."""
        self._reading, self._row_reader = reading, row_reader

    def all(self) -> list[KnownAlert]:
        """All alerts whose rows can be read."""
        with self._reading() as session:
            return list(self._row_reader.each(session.scalars(select(AlertRow)), alert_of))


def change(session: Session, kept: Iterable[KnownAlert], removed: Iterable[tuple[str, str]]) -> None:
    """Stores the alerts `kept` and deletes the alerts with the keys `removed`, in the session's transaction.

    A key is a run's name and an alert's fingerprint.
    """
    for key in removed:
        if (row := session.get(AlertRow, key)) is not None:
            session.delete(row)
    for alert in kept:
        run, fingerprint = alert.key
        body = alert.view.model_dump(mode="json")
        session.merge(AlertRow(run=run, fingerprint=fingerprint, owner=alert.owner, body=body))


def alert_of(row: AlertRow) -> KnownAlert:
    """The alert of a database row; raises for a row that cannot be read."""
    alert = KnownAlert(AlertView.model_validate(row.body), row.owner)
    if alert.key != (row.run, row.fingerprint):
        raise ValueError("run or fingerprint of the stored row differ from those in the alert that it holds")
    return alert
