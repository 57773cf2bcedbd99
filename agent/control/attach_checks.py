"""The settings of `attach` and their checks, and creation of the link to the daemon. Problems of the environment are
logged as warnings, and training continues."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import psutil
import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn.parallel import DistributedDataParallel

from tidegate.agent.control.daemon_link import AgentLink
from tidegate.agent.control.report_source import ReportSource
from tidegate.agent.gradients.gradients import Mode
from tidegate.agent.ranks import Ranks, local_rank
from tidegate.client.discovery import find_token, is_loopback
from tidegate.client.transport import check_address
from tidegate.errors import ConfigError, DaemonError, TidegateError
from tidegate.knobs.setting_checks import check_flag, check_text
from tidegate.logs import configure_from_environment, event
from tidegate.wire.agent import AgentHello
from tidegate.wire.base import RunName

log = logging.getLogger("tidegate")

_RUN_NAME: Final = TypeAdapter(RunName)
_LONGEST_HOST: Final = 253
"""Maximum number of characters of a host name in DNS."""


@dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """Keyword arguments of `tidegate.attach`. The docstring of `attach` describes them."""

    run: str
    daemon: str | None = None
    token: str | None = None
    metrics_bind: str = "127.0.0.1"
    metrics_port: int = 0
    advertise_host: str | None = None
    reset_knobs: bool = False
    strict: bool = False

    def check(self) -> None:
        """Raises ConfigError for values that are wrong in every environment."""
        try:
            _RUN_NAME.validate_python(self.run)
        except ValidationError as error:
            raise ConfigError(
                f"run={_shown(self.run)} is not a valid name of a run: use 1 to 64 of letters, digits, '.', '_' and "
                "'-', beginning with a letter or a digit."
            ) from error
        if self.daemon is not None:
            check_text("daemon", self.daemon, "http://127.0.0.1:8790")
            try:
                check_address(self.daemon)
            except DaemonError as error:
                raise ConfigError(f"daemon={_shown(self.daemon)}: {error}") from error
        token: object = self.token
        if token is not None and not isinstance(token, str):
            raise ConfigError(
                f"token is a {type(token).__name__}, not a string: leave it out, or give the daemon's token."
            )
        check_text("metrics_bind", self.metrics_bind, "127.0.0.1")
        check_flag("reset_knobs", self.reset_knobs)
        check_flag("strict", self.strict)
        port: object = self.metrics_port
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
            raise ConfigError(f"metrics_port={_shown(port)} is not a port: use 1 to 65535, or 0 for any free port.")
        host: object = self.advertise_host
        if host is not None and not (isinstance(host, str) and 0 < len(host) <= _LONGEST_HOST and host.isprintable()):
            raise ConfigError(
                f"advertise_host={_shown(host)} is not a host: give a name or an address of at most {_LONGEST_HOST} "
                "characters."
            )


def check_model(model: object, gradients: Mode) -> None:
    """Raises ConfigError unless `model` is None, or a module that works with `Offload(gradients=…)`."""
    if model is None:
        return
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}, not a torch.nn.Module: give the model, or leave it out.")
    if gradients == "release" and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(
            "The model is in DistributedDataParallel (DDP), and the optimizer has gradients='release': DDP reads "
            "gradients after they were released. Build the optimizer with Offload(gradients='keep')."
        )


def metrics_port_of_rank(first: int) -> int:
    """Returns the port of this rank's /metrics: `first` plus the rank's number on this host, or 0 (any
    free port) if `first` is 0. Raises ConfigError if the port would be above 65535."""
    here = local_rank()
    if first and first + here > 65_535:
        raise ConfigError(
            f"metrics_port={first} and rank {here} of this host make port {first + here}, and the highest is 65535: "
            f"choose a lower metrics_port, or 0 for a free one."
        )
    return first and first + here


def warn_if_unreachable(settings: AttachSettings, metrics_address: str) -> None:
    """Logs a warning if the daemon is on another host and only this host reaches `metrics_address` ("host:port")."""
    if settings.daemon is None or not _is_this_host(metrics_address.rpartition(":")[0]):
        return
    if _leads_here(urlsplit(settings.daemon).hostname or ""):
        return
    log.warning(
        "The metrics of this rank are at %s, which other hosts do not reach, and the daemon is at %s: a Prometheus "
        "that has its targets from the daemon (/sd) gets no metrics of this rank. Give attach() this host's address in "
        'the network of the daemon as metrics_bind=; or metrics_bind="0.0.0.0" and that address as advertise_host=.',
        metrics_address, settings.daemon,
        extra=event("metrics_unreachable", metrics_address=metrics_address, daemon=settings.daemon),
    )  # fmt: skip


def _leads_here(host: str) -> bool:
    """Whether a host name or an address is one of this host."""
    if _is_this_host(host) or host == socket.gethostname().lower():
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    except OSError:  # a name that nobody knows, or a host that hides its addresses
        return False
    return bool(found & own) or any(_is_this_host(address) for address in found)


def _is_this_host(host: str) -> bool:
    """Whether an address leads each host to itself: loopback, or the address for all interfaces."""
    host = host.strip("[]")
    return is_loopback(host) or host in ("0.0.0.0", "::")


def configure_logs(strict: bool) -> None:
    """Configures logging as the environment variable TIDEGATE_LOG_FORMAT says. For an unknown format it raises
    ConfigError if `strict`; otherwise it logs a warning."""
    try:
        configure_from_environment()
    except ConfigError as error:
        if strict:
            raise
        log.warning("%s The log format is unchanged.", error, extra=event("log_format_refused", reason=str(error)))


def raise_on_all_ranks(ranks: Ranks) -> AbstractContextManager[None]:
    """Context manager in which an error on one rank makes all ranks raise. A collective of all ranks."""
    return ranks.failing_together(
        ConfigError("Another rank could not attach, so this one does not either: that rank's error says why.")
    )


def connect(
    settings: AttachSettings, hello: Callable[[], AgentHello], source: ReportSource, rank: int
) -> AgentLink | None:
    """Creates the link to the daemon and starts its threads. Returns None if the settings name no daemon. If the link
    cannot be created, `strict` decides: a TidegateError is raised, or a warning is logged and None is returned.

    hello: function that builds the registration message.
    source: object that builds the reports.
    rank: number of this rank, for the warning.
    """
    if settings.daemon is None:
        return None
    link: AgentLink | None = None
    try:
        link = AgentLink(settings.daemon, settings.token or find_token("agent"), validated(hello), source)
        link.start(settings.strict)
        return link
    except Exception as error:
        if link is not None:
            link.leave(None, "")
        if settings.strict:
            if isinstance(error, TidegateError):
                raise
            raise DaemonError(f"The link to the daemon cannot start: {type(error).__name__}: {error}.") from error
        reason = str(error) if isinstance(error, TidegateError) else f"{type(error).__name__}: {error}."
        log.warning(
            "run %s, rank %d has no link to the daemon: %s Training goes on, its knobs stay as they are and its "
            "metrics are served.",
            settings.run, rank, reason, extra=event("link_refused", reason=reason),
        )  # fmt: skip
        return None


def validated(hello: Callable[[], AgentHello]) -> AgentHello:
    """Builds the registration message. ConfigError when the daemon would reject its values."""
    try:
        return hello()
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        field = ".".join(map(str, wrong["loc"])) or "its parts together"
        raise ConfigError(
            f"The daemon would refuse the registration message of this rank: {field} is out of bounds "
            f"({wrong['msg']}). Change the setting of the run or of the optimizer that gives this value."
        ) from error


def _shown(value: object) -> str:
    """Converts a wrong value to a short text for an error message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
