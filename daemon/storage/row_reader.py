"""Reads database rows one by one: a row that cannot be read is skipped and logged, so that the others can be used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from tidegate.daemon.storage.schema import Base

Row = TypeVar("Row", bound=Base)
T = TypeVar("T")
REMEDY: Final = "stop the daemon and run `tidegate doctor --state DIRECTORY`, which moves unreadable rows away"
"""What to do about a row that cannot be read, for messages."""
log = logging.getLogger(__name__)


class RowReader:
    """Converts rows to objects, and remembers the keys of rows that could not be converted."""

    def __init__(self) -> None:
        self.unreadable: dict[str, set[tuple[Any, ...]]] = {}
        """Primary keys of the unreadable rows, by table."""

    def each(self, rows: Iterable[Row], make: Callable[[Row], T]) -> Iterator[T]:
        """Yields `make(row)` for each row; a row for which `make` raises is skipped and logged."""
        for row in rows:
            try:
                made = make(row)
            except Exception as error:  # what a damaged row raises depends on the damage
                self.leave_out(row.__tablename__, key_of(row), error)
            else:
                yield made

    def leave_out(self, table: str, key: tuple[Any, ...], error: Exception) -> None:
        """Adds a row that cannot be read to `unreadable` and logs it; does nothing if the row was added before."""
        known = self.unreadable.setdefault(table, set())
        if key not in known:
            known.add(key)
            log.error("row %r of table %s cannot be read and is ignored (%s): %s", key, table, reason(error), REMEDY)


def key_of(row: Base) -> tuple[Any, ...]:
    """The row's primary key."""
    return tuple(getattr(row, column.name) for column in row.__table__.primary_key)


def reason(error: Exception) -> str:
    """The error as text in one line, without the data of the row."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        first = errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".encode("ascii", "replace").decode()[:300]
    return f"{type(error).__name__}: {error}".splitlines()[0].encode("ascii", "replace").decode()[:300]


def text_of(value: bytes) -> str:
    """Text factory for SQLite. Invalid UTF-8 becomes a text that validation rejects later, so only this row fails."""
    return value.decode("utf-8", "surrogateescape")


def json_of(text: str) -> Any:
    """JSON deserializer for SQLite. Invalid JSON stays a string, which validation rejects later."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
