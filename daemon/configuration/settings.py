"""Settings of the daemon: the state directory, the address, TLS, limits and retention."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tidegate.client.daemon_client import MAX_BODY_BYTES
from tidegate.client.discovery import state_dir
from tidegate.client.state_files import home_of
from tidegate.daemon.configuration.tls import refusal_reason
from tidegate.errors import DaemonError

_NAME: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
_ADDRESS: Final = re.compile(rf"(?:{_NAME.pattern}|\[[0-9A-Fa-f:.]{{2,45}}\])(?::[0-9]{{1,5}})?")


class Settings(BaseModel):
    """Settings of one daemon. Durations are seconds, sizes are bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_dir: Path = Field(default_factory=state_dir)
    token_dir: Path | None = None
    """Directory with one file `<scope>.token` for every scope, provided from outside (secrets mounted as files). The
    daemon reads these files and never writes them. None: the daemon makes the token files in `home`."""
    database_url: str | None = None
    """URL of the database in SQLAlchemy's format. None: an SQLite file in `home`."""
    bind: str = "127.0.0.1"
    port: int = Field(default=8790, ge=0, le=65_535)
    """Port to listen on; 0 chooses a free port."""
    advertise_address: str | None = None
    """Name or address by which other machines reach this daemon. It is accepted in the Host header, and a TLS
    certificate must be valid for it. None: clients use this machine's own names."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted values of the Host header in addition to the daemon's own names. `*.example.com` accepts all names below
    `example.com`, `*` accepts any name."""
    metrics: bool = True
    tls_certificate: Path | None = None
    """PEM file with the certificate and its chain; with it the daemon speaks HTTPS only."""
    tls_key: Path | None = None
    """PEM file with the private key of the certificate. None: the key is in the file `tls_certificate`."""
    forgiven_failures: int = Field(default=20, ge=1)
    """Number of failed requests that are allowed for each token and each address. After that the daemon answers 429
    with a time to wait. A request with an invalid token counts for the token and the address. A request with a valid
    token that lacks the required scope or run counts for the token only."""
    request_seconds: float = Field(default=10.0, gt=0, le=3_600)
    """Seconds after which a connection without a valid token is closed, if no request on it was answered in this
    time."""
    lease_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """Duration of the lease in seconds. After its last message a rank is live for this time, then stale until three
    times this time have passed, and then lost."""
    proposal_seconds: float = Field(default=5.0, gt=0)
    """Time limit for the ranks to answer whether they can apply a proposed generation. If an answer is missing then,
    the generation is aborted."""
    keep_reports_seconds: float = Field(default=7 * 86_400.0, gt=0)
    """Seconds for which a reported step is kept. Older steps are not served and are deleted, except for the last step
    of each rank. At most the newest 256 steps of each rank are kept."""
    keep_runs_seconds: float = Field(default=30 * 86_400.0, gt=0)
    """Runs that have ended are deleted this long after the last message of any rank; their audit log stays."""
    max_body_bytes: int = Field(default=MAX_BODY_BYTES, gt=0)

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if (
                "*" not in host.removeprefix("*.")
                and _NAME.fullmatch(host.removeprefix("*.")) is None
                and not _is_ipv6(host)
            ):
                raise ValueError(
                    f"--allowed-host {host!r} is neither a host name nor an address: use letters, digits, dots and "
                    "hyphens, at most 253 characters"
                )
            if "*" in host.removeprefix("*.") and host != "*":
                raise ValueError(
                    f"--allowed-host {host!r} is not a valid pattern: give the name of a host, *.example.com for all "
                    "below example.com, or * for any"
                )
        return hosts

    @field_validator("bind")
    @classmethod
    def _check_bind(cls, bind: str) -> str:
        if not bind.strip():
            raise ValueError(
                f"--bind {bind!r} is not an address: give 127.0.0.1 for this machine only, or 0.0.0.0 for all addresses"
            )
        return bind

    @field_validator("advertise_address")
    @classmethod
    def _check_advertised(cls, address: str | None) -> str | None:
        if address is not None and _ADDRESS.fullmatch(address) is None and not _is_ipv6(address):
            raise ValueError(
                f"--advertise-address {address!r} is neither a host nor host:port: give the name or address by which "
                "others reach the daemon, without a scheme and without a path"
            )
        return address

    @property
    def url(self) -> str:
        """The database's URL."""
        return self.database_url or f"sqlite:///{self.database}"

    @property
    def home(self) -> Path:
        """The folder of the state: the daemon's own folder inside `state_dir` if there is one, else `state_dir` itself.
        The own folder is created at start if `state_dir` is not private to this user."""
        return home_of(self.state_dir)

    @property
    def database(self) -> Path:
        """Path of the SQLite file, which is used if `database_url` is None."""
        return self.home / "tidegate.db"

    def announced_host(self, listening: str) -> str:
        """Host name of the daemon's URL for clients on this machine; `listening` is the address that it listens on.

        With TLS it is a name that the certificate is valid for: the advertised name, else a name of this machine.
        DaemonError when the certificate is valid for no such name, or cannot be used.
        """
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listening, listening)
        if self.tls_certificate is None:
            if self.tls_key is not None:
                raise DaemonError("--tls-key was given without --tls-certificate: give both.")
            return shown
        if self.advertise_address:
            names = [_hostname(self.advertise_address)]
        else:
            names = list(dict.fromkeys((shown, "localhost", socket.gethostname(), socket.getfqdn())))
        reasons = {name: refusal_reason(self.tls_certificate, self.tls_key, name) for name in names}
        valid = next((name for name, reason in reasons.items() if not reason), None)
        if valid is None:
            remedy = (
                "get a certificate for that name"
                if self.advertise_address
                else "give a name that it is valid for with --advertise-address"
            )
            why = "; ".join(f"{name}: {reason.rstrip('.')}" for name, reason in reasons.items())
            raise DaemonError(f"Clients would refuse the certificate {self.tls_certificate} ({why}): {remedy}.")
        return valid

    @property
    def hosts(self) -> frozenset[str]:
        """Accepted values of the Host header; other values are refused, because they may be DNS rebinding attacks."""
        own = {"127.0.0.1", "localhost", "::1", socket.gethostname(), socket.getfqdn(), self.bind}
        if self.advertise_address:
            own.add(_hostname(self.advertise_address))
        return frozenset(host.lower() for host in own | set(self.allowed_hosts))


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _hostname(address: str) -> str:
    """The host part of an address of the form `host`, `host:port`, `[v6]` or `[v6]:port`."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address
