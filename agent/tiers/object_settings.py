"""User settings of a storage path in an object store."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from tidegate.errors import ConfigError
from tidegate.knobs.setting_checks import check_number, check_text, check_whole

LEAST: Final = {"threads": 1, "block_bytes": 4096, "lock_slots": 0, "capacity_bytes": 0}
"""Minimum value of each integer setting of every path, by name."""

_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True, kw_only=True)
class ObjectSettings:
    """Settings of one storage path in an S3-compatible object store. Needs `pip install 'tidegate[s3]'`.

    Credentials are not part of the settings. They come from the places that the AWS tools search: environment, shared
    files, the role of the container or machine.

    url: "s3://bucket/prefix"; the bucket must exist (address; required).
    endpoint: "http://host:port" or "https://host" of the server. The empty default stands for AWS_ENDPOINT_URL_S3 or
        AWS_ENDPOINT_URL if set, else Amazon's (address; default "").
    region: region of the bucket. The empty default stands for the region that the AWS tools are configured for, else
        us-east-1 (name; default "").
    threads: objects read at once, and objects written at once; at least 1 (count; default 8).
    block_bytes: size of one object, one transfer and one checksummed block; a multiple of 4096. Each thread that reads
        needs as much memory (bytes; default 8388608).
    lock_slots: processes of this node that may use the bucket at once (MLP-Offload, section 3.2); 0 for no exclusive
        access (count; default 0).
    capacity_bytes: limit for the state stored here; 0 for no limit. During a flush a subgroup needs its space twice
        (bytes; default 0).
    timeout_seconds: limit for one request; more than 0 (seconds; default 30.0).
    retry_seconds: for how long a request that failed with a transient error is retried (seconds; default 30.0).

    Raises ConfigError for a value of another type or out of these bounds.
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
        check_whole_settings(self, LEAST)
        check_number("timeout_seconds", self.timeout_seconds, above=0.0, of=" of a path")
        check_number("retry_seconds", self.retry_seconds, of=" of a path")
        check_text("url", self.url, "s3://training/tide", of=" of a path")
        check_text("endpoint", self.endpoint, "http://127.0.0.1:9000", of=" of a path")
        check_text("region", self.region, "us-east-1", of=" of a path")
        _parse_address(self.url, ("s3",), 's3://bucket/prefix, as in "s3://training/tide"')
        if self.endpoint:
            _parse_address(self.endpoint, ("http", "https"), 'the address of a server, as in "http://127.0.0.1:9000"')

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """Prefix of all keys in the bucket, without slashes at its ends; may be empty."""
        return urlsplit(self.url).path.strip("/")

    @property
    def location(self) -> str:
        """Location of the path as text for messages."""
        return self.url

    @property
    def place(self) -> str:
        """Deprecated name of `location`. It will be removed in the next version."""
        warnings.warn(
            "ObjectSettings.place is deprecated: use ObjectSettings.location.", DeprecationWarning, stacklevel=2
        )
        return self.location

    @property
    def server(self) -> str:
        """URL of the server in use; "" for Amazon's. Raises ConfigError when an environment variable holds a malformed
        address."""
        endpoint = self.endpoint or next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), "")
        if endpoint:
            _parse_address(endpoint, ("http", "https"), 'the address of a server, as in "http://127.0.0.1:9000"')
        return endpoint.rstrip("/")


def _parse_address(address: str, schemes: tuple[str, ...], wanted: str) -> SplitResult:
    """Parses an address. ConfigError when it is malformed. If the address may contain credentials, the error does not
    quote it. `wanted`: description of a valid address, for the error."""
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
        raise ConfigError(f"The address {address!r} is not {wanted}.")
    return parts


def check_whole_settings(settings: object, least: Mapping[str, int]) -> None:
    """Checks the integer settings of a path, and stores them as `int`. `least`: minimum of each, by name. ConfigError
    for a value that is too low or no whole number."""
    for name, minimum in least.items():
        multiple_of = 4096 if name == "block_bytes" else 1
        number = check_whole(name, getattr(settings, name), minimum, of=" of a path", multiple_of=multiple_of)
        object.__setattr__(settings, name, number)
