"""Proof that a peer is the daemon of a state directory: only that daemon knows the secret in its file `proof.key`.

The client sends a nonce on a new connection; the daemon answers an HMAC over it and the address at which the connection
arrived. So neither an answer from before nor one for another address or port, as of somebody who passes on what both
say, is a proof. What follows on a connection that was proven goes to the daemon.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import io
import ipaddress
import json
import secrets
from pathlib import Path
from typing import Any, Final, Protocol, cast

from tidegate.client.state_files import read_no_link

KEY_FILE: Final = "proof.key"
PATH: Final = "/v1/proof"
NONCE_PATTERN: Final = "^[0-9a-f]{32,128}$"
LONGEST_ANSWER: Final = 4_096


class Stream(Protocol):
    """A connection, as httpcore has it."""

    def read(self, max_bytes: int) -> bytes: ...
    def write(self, buffer: bytes) -> None: ...
    def get_extra_info(self, info: str) -> Any: ...


class FromState(str):
    """A token, or a daemon's address, that was found in a state directory: what is asked with it needs proof.

    key: that directory's secret; empty where it has none. home: the directory.
    """

    key: str
    home: Path

    @classmethod
    def of(cls, text: str, home: Path) -> FromState:
        made = cls(text)
        made.home, made.key = home, read_key(home)
        return made


def read_key(home: Path) -> str:
    """The secret of the state in `home`; empty where there is none that this user can read."""
    try:
        return read_no_link(home / KEY_FILE)[0].strip()
    except OSError:
        return ""


def sign(key: str, nonce: str, host: str, port: int) -> str:
    """What proves that one knows `key`, on a connection that arrived at this address and port."""
    address = ipaddress.ip_address(host.partition("%")[0])
    plain = getattr(address, "ipv4_mapped", None) or address
    told = f"tidegate proof 1\n{plain}\n{port}\n{nonce}"
    return hmac.new(key.encode(), told.encode(), hashlib.sha256).hexdigest()


def is_proven(stream: Stream, host: str, key: str) -> bool:
    """Whether who is at the other end of a new connection knows `key`. `host`: value of the Host header."""
    if not key:
        return False
    nonce = secrets.token_hex(32)
    stream.write(
        f"GET {PATH}?nonce={nonce} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n\r\n".encode("ascii")
    )
    answer = http.client.HTTPResponse(cast("Any", _Readable(stream)), method="GET")
    try:
        answer.begin()
        body = answer.read(LONGEST_ANSWER)
        told = json.loads(body).get("proof") if answer.status == 200 and answer.isclosed() else None
    except (http.client.HTTPException, ValueError, AttributeError):
        return False
    peer = stream.get_extra_info("server_addr")
    return isinstance(told, str) and hmac.compare_digest(
        told.encode("utf-8", "replace"), sign(key, nonce, peer[0], peer[1]).encode()
    )


class _Readable(io.RawIOBase):
    """The connection as the file that `http.client` reads."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
