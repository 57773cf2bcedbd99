"""An attachment joins its run: its arguments are checked, and what the environment holds stops no training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from pydantic import TypeAdapter, ValidationError

from tidegate.agent.control.daemon_link import AgentLink, Speaker
from tidegate.client.daemon_client import check_address, find_token
from tidegate.errors import ConfigError, DaemonError, TidegateError
from tidegate.logs import configure_from_environment, event
from tidegate.wire.agent import AgentHello
from tidegate.wire.base import RunName

log = logging.getLogger("tidegate")

_RUN_NAME: Final = TypeAdapter(RunName)
_LONGEST_HOST: Final = 253
"""Characters of a host's name in DNS."""


def check_arguments(run: str, daemon: str | None, metrics_port: int, advertise_host: str | None) -> None:
    """ConfigError for what can work nowhere, whatever the environment holds."""
    try:
        _RUN_NAME.validate_python(run)
    except ValidationError as error:
        raise ConfigError(
            f"run={_shown(run)} is no name of a run: use 1 to 64 of letters, digits, '.', '_' and '-', the first of "
            "them a letter or a digit."
        ) from error
    if daemon is not None:
        try:
            check_address(daemon)
        except DaemonError as error:
            raise ConfigError(f"daemon={_shown(daemon)}: {error}") from error
    if isinstance(metrics_port, bool) or not isinstance(metrics_port, int) or not 0 <= metrics_port < 1 << 16:
        raise ConfigError(f"metrics_port={_shown(metrics_port)} is no port: use 1 to 65535, or 0 for any that is free.")
    if advertise_host is not None and not (
        isinstance(advertise_host, str) and 0 < len(advertise_host) <= _LONGEST_HOST and advertise_host.isprintable()
    ):
        raise ConfigError(
            f"advertise_host={_shown(advertise_host)} is no host: give a name or an address, {_LONGEST_HOST} "
            "characters at most."
        )


def configure_logs(strict: bool) -> None:
    """As TIDEGATE_LOG_FORMAT says. A format that there is not raises only where `strict`."""
    try:
        configure_from_environment()
    except ConfigError as error:
        if strict:
            raise
        log.warning("%s Logs stay as they are.", error, extra=event("log_format_refused", reason=str(error)))


def join(
    daemon: str, token: str | None, hello: Callable[[], AgentHello], speaker: Speaker, rank: str, strict: bool
) -> AgentLink | None:
    """The link to the daemon, which has begun; None, with a warning, where there can be none.

    rank: which one it is, for the warning. strict: raises one of our errors instead.
    """
    link: AgentLink | None = None
    try:
        link = AgentLink(daemon, token or find_token("agent"), made(hello), speaker)
        link.start(strict)
        return link
    except Exception as error:
        if link is not None:
            link.leave(None)
        if strict:
            if isinstance(error, TidegateError):
                raise
            raise DaemonError(f"The link to the daemon cannot begin: {type(error).__name__}: {error}.") from error
        reason = str(error) if isinstance(error, TidegateError) else f"{type(error).__name__}: {error}."
        log.warning(
            "%s has no link to the daemon: %s Training goes on, its knobs stay as they are and its metrics are served.",
            rank, reason, extra=event("link_refused", reason=reason),
        )  # fmt: skip
        return None


def made(hello: Callable[[], AgentHello]) -> AgentHello:
    """ConfigError for what the daemon would not take."""
    try:
        return hello()
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        field = ".".join(map(str, wrong["loc"])) or "its parts together"
        raise ConfigError(
            f"What this rank would tell the daemon is out of bounds ({field}: {wrong['msg']})."
        ) from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
