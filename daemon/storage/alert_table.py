"""The stored alerts: the newest word on each that is kept, and whose token told of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from tidegate.daemon.storage.row_reader import Readable
from tidegate.daemon.storage.schema import AlertRow
from tidegate.wire.alert import AlertView


@dataclass(frozen=True, slots=True)
class KnownAlert:
    """`owner`: id of the token that told of it first; empty where nobody knows."""

    view: AlertView
    owner: str

    @property
    def key(self) -> tuple[str, str]:
        return self.view.run, self.view.fingerprint


class AlertTable:
    """The alerts of one database."""

    def __init__(self, reading: sessionmaker[Session], readable: Readable) -> None:
        """`reading`: sessions that only read."""
        self._reading, self._readable = reading, readable

    def all(self) -> list[KnownAlert]:
        """Those that can be read."""
        with self._reading() as session:
            return list(self._readable.each(session.scalars(select(AlertRow)), alert_of))


def change(session: Session, kept: Iterable[KnownAlert], gone: Iterable[tuple[str, str]]) -> None:
    """Stores these and removes those, in the session's transaction."""
    for key in gone:
        if (row := session.get(AlertRow, key)) is not None:
            session.delete(row)
    for alert in kept:
        run, fingerprint = alert.key
        body = alert.view.model_dump(mode="json")
        session.merge(AlertRow(run=run, fingerprint=fingerprint, owner=alert.owner, body=body))


def alert_of(row: AlertRow) -> KnownAlert:
    """Raises for a row that cannot be read."""
    found = KnownAlert(AlertView.model_validate(row.body), row.owner)
    if found.key != (row.run, row.fingerprint):
        raise ValueError("it is that of another alert")
    return found
