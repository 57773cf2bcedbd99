"""Rows of the database, read one at a time: one that cannot be read is left out and told, and fails no other."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from tidegate.daemon.storage.schema import Base

Row = TypeVar("Row", bound=Base)
T = TypeVar("T")
REMEDY: Final = "stop the daemon and run `tidegate doctor --state DIRECTORY`, which moves it out of the way"
log = logging.getLogger(__name__)


class Readable:
    """Reads rows, and keeps the keys of those that it could not."""

    def __init__(self) -> None:
        self.unreadable: dict[str, set[tuple[Any, ...]]] = {}
        """By table."""

    def each(self, rows: Iterable[Row], make: Callable[[Row], T]) -> Iterator[T]:
        """What `make` makes of each row, without those of which it makes nothing."""
        for row in rows:
            try:
                made = make(row)
            except Exception as error:  # what a damaged row raises depends on the damage
                self.leave_out(row.__tablename__, key_of(row), error)
            else:
                yield made

    def leave_out(self, table: str, key: tuple[Any, ...], error: Exception) -> None:
        """Tells of a row that cannot be read, once."""
        known = self.unreadable.setdefault(table, set())
        if key not in known:
            known.add(key)
            why = reason(error)
            log.error("row %r of table %s cannot be read and is left out (%s): %s", key, table, why, REMEDY)


def key_of(row: Base) -> tuple[Any, ...]:
    """Its primary key."""
    return tuple(getattr(row, column.name) for column in row.__table__.primary_key)


def reason(error: Exception) -> str:
    """The error in one line, without what the row holds."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        first = errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".encode("ascii", "replace").decode()[:300]
    return f"{type(error).__name__}: {error}".splitlines()[0].encode("ascii", "replace").decode()[:300]


def text_of(found: bytes) -> str:
    """For SQLite: bytes that are no text become a text that no message takes, instead of an error for all rows."""
    return found.decode("utf-8", "surrogateescape")


def json_of(text: str) -> Any:
    """For SQLite: what is no JSON stays the text that it is, which no message takes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
