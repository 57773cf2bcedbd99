"""Logs for people and for machines: one line for each event that matters, as text or as JSON.

Code logs as ever, and adds what a machine wants to know: `log.info("path %s is full", p, extra=event("path_full",
path=p))`. As JSON each line has `timestamp`, `level`, `logger`, `message`, and where given `event` and its fields.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from tidegate.errors import ConfigError
from tidegate.terminal import visible

VARIABLE: Final = "TIDEGATE_LOG_FORMAT"
"""How the agent logs in other people's programs: they have handlers of their own, or set this to get ours."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def event(name: str, **fields: Any) -> dict[str, Any]:
    """For `extra` of a log call. The name says what happened, in the past: `path_retired`."""
    return {"event": name, "fields": fields}


class JsonFormatter(logging.Formatter):
    """One JSON object a record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := getattr(record, "event", None):
            row |= {"event": name, **getattr(record, "fields", {})}
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return visible(json.dumps(row, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """For people, in which texts from elsewhere cannot hide anything."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Handler(logging.StreamHandler[Any]):
    """To stderr. A class of its own, so that none of ours is there twice."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(
            JsonFormatter() if form is LogFormat.JSON
            else TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        )  # fmt: skip


def configure(form: LogFormat) -> None:
    """For our own commands: everything that is logged in this process goes to stderr in this form. Of others'
    libraries, warnings and errors."""
    root = logging.getLogger()
    for handler in _ours():
        root.removeHandler(handler)
    root.addHandler(_Handler(form))
    logging.getLogger("tidegate").setLevel(logging.INFO)


def visible_without_handlers() -> None:
    """For our own commands: what is logged where nobody has set up logs goes to stderr as before, and nothing in it is
    an order to the terminal."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(TextFormatter("%(message)s"))


def configure_from_environment() -> None:
    """For the agent: our own logs, where TIDEGATE_LOG_FORMAT is set and nobody has said it otherwise. ConfigError for a
    value that is no format."""
    wanted = os.environ.get(VARIABLE)
    if not wanted or _ours():
        return
    try:
        form = LogFormat(wanted)
    except ValueError as error:
        known = ", ".join(LogFormat)
        raise ConfigError(f"{VARIABLE}={wanted!r} is no log format; one of: {known}.") from error
    log = logging.getLogger("tidegate")
    log.addHandler(_Handler(form))
    log.setLevel(logging.INFO)
    log.propagate = False


def _ours() -> list[logging.Handler]:
    handlers = [*logging.getLogger().handlers, *logging.getLogger("tidegate").handlers]
    return [handler for handler in handlers if isinstance(handler, _Handler)]
