"""What a user says of a storage path that is a prefix of an object store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from tidegate.errors import ConfigError

SCHEME: Final = "s3://"
_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True, kw_only=True)
class ObjectSettings:
    """One storage path in an object store that speaks S3. Needs `pip install 'tidegate[s3]'`.

    Credentials are no settings: they come from where the AWS tools find them (environment, shared files, the
    container's or the machine's role).

    url: "s3://bucket/prefix"; the bucket must exist.
    endpoint: "http://host:port" or "https://host" of the server; "" for AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL where
        they are set, else Amazon's.
    region: "" for what the AWS tools are configured for, else us-east-1.
    threads: objects that are read at once, and as many that are written.
    block_bytes: the unit of one object, of one transfer and of one checksum; a multiple of 4096. So much memory is
        used for each thread that reads.
    lock_slots: processes of this node that may use the bucket at once; 0 for no exclusive access.
    capacity_bytes: what state may take here; 0 for no bound. A subgroup that is being flushed takes its room twice.
    timeout_seconds: how long one request may take.
    retry_seconds: how long a request that fails in a way that may pass is repeated.
    """

    url: str
    endpoint: str = ""
    region: str = ""
    threads: int = 8
    block_bytes: int = 8 << 20
    lock_slots: int = 0
    capacity_bytes: int = 0
    timeout_seconds: float = 30.0
    retry_seconds: float = 30.0

    def __post_init__(self) -> None:
        bounds = {"threads": 1, "block_bytes": 4096, "lock_slots": 0, "capacity_bytes": 0, "retry_seconds": 0}
        for name, minimum in bounds.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)} of a path is out of range: at least {minimum}.")
        if self.timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds} of a path is out of range: more than 0.")
        if self.block_bytes % 4096:
            raise ConfigError(f"block_bytes={self.block_bytes} of a path must be a multiple of 4096.")
        _split(self.url, ("s3",), 's3://bucket/prefix, as in "s3://training/tide"')
        if self.endpoint:
            _split(self.endpoint, ("http", "https"), 'the address of a server, as in "http://127.0.0.1:9000"')

    @property
    def bucket(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """Without slashes at its ends; may be empty."""
        return urlsplit(self.url).path.strip("/")

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self.url

    @property
    def server(self) -> str:
        """The endpoint that is used; "" for Amazon's. ConfigError when the environment names a bad one."""
        found = self.endpoint or next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), "")
        if found:
            _split(found, ("http", "https"), 'the address of a server, as in "http://127.0.0.1:9000"')
        return found.rstrip("/")


def _split(address: str, schemes: tuple[str, ...], wanted: str) -> SplitResult:
    """ConfigError when it is not such an address. One that holds credentials is not repeated."""
    if "@" in address:
        raise ConfigError(
            "The address of an object store holds credentials, or an '@': leave them out, they come from the "
            "environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, …)."
        )
    try:
        parts = urlsplit(address)
        sound = parts.scheme in schemes and bool(parts.hostname) and not parts.query and not parts.fragment
        sound = sound and (parts.port is None or parts.scheme != "s3")
    except ValueError:  # a port that is no number
        sound = False
    if not sound:
        raise ConfigError(f"{address!r} is not {wanted}.")
    return parts
