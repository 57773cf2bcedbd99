"""Logging: one line for each event, as text or as JSON.

Code uses the normal logging calls, and adds structured fields with `event`:
`log.info("path %s is full", p, extra=event("path_full", path=p))`. As JSON, each line has `timestamp`, `level`,
`logger`, `message` and, where given, `event` and its fields.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from tidegate.errors import ConfigError
from tidegate.terminal import visible

VARIABLE: Final = "TIDEGATE_LOG_FORMAT"
"""Name of the environment variable with the log format (`LogFormat`). If it is set, the agent logs to stderr in this
format. It is meant for training scripts without log handlers of their own."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def event(name: str, **fields: Any) -> dict[str, Any]:
    """The argument `extra` of a log call, for a structured event. The name is in the past tense: `path_retired`."""
    return {"event": name, "fields": fields}


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object on one line."""

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
    """Formats records as text, with control characters escaped and times in UTC."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Handler(logging.StreamHandler[Any]):
    """Log handler of Tidegate, which writes to stderr. The subclass lets `_installed_handlers` recognize it."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(
            JsonFormatter() if form is LogFormat.JSON
            else TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        )  # fmt: skip


def configure(form: LogFormat) -> None:
    """For Tidegate's commands: sends all logs of this process to stderr in this format; from other libraries only
    warnings and errors."""
    root = logging.getLogger()
    for handler in _installed_handlers():
        root.removeHandler(handler)
    root.addHandler(_Handler(form))
    logging.getLogger("tidegate").setLevel(logging.INFO)


def visible_without_handlers() -> None:
    """For Tidegate's commands: escapes control characters in the logs of a process that has no log handlers.

    Such logs go to stderr through Python's handler of last resort, whose format is changed.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(TextFormatter("%(message)s"))


def configure_from_environment() -> None:
    """For the agent: installs a handler for Tidegate's logs if TIDEGATE_LOG_FORMAT is set and none is installed yet.
    ConfigError for a value that is not a format."""
    wanted = os.environ.get(VARIABLE)
    if not wanted or _installed_handlers():
        return
    try:
        form = LogFormat(wanted)
    except ValueError as error:
        known = ", ".join(LogFormat)
        raise ConfigError(f"{VARIABLE}={wanted!r} is not a log format: use one of {known}.") from error
    log = logging.getLogger("tidegate")
    log.addHandler(_Handler(form))
    log.setLevel(logging.INFO)
    log.propagate = False


def _installed_handlers() -> list[logging.Handler]:
    """Tidegate's handlers that are installed."""
    handlers = [*logging.getLogger().handlers, *logging.getLogger("tidegate").handlers]
    return [handler for handler in handlers if isinstance(handler, _Handler)]
