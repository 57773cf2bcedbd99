"""Proof that a server is the daemon of a state directory: only that daemon knows the secret in its file `proof.key`.

The client sends a nonce on a new connection; the daemon answers with an HMAC over the nonce and the address at which
the connection arrived. So an earlier answer is not a proof, and neither is an answer for another address or port, which
a relay between client and daemon (man in the middle) would give. After the proof, the connection is trusted.
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
    """A network connection with the methods of httpcore's streams that the proof needs."""

    def read(self, max_bytes: int) -> bytes: ...
    def write(self, buffer: bytes) -> None: ...
    def get_extra_info(self, info: str) -> Any: ...


class FromState(str):
    """A token or a daemon's address that was read from a state directory. Before it is used, the server must prove that
    it is the daemon of that directory.

    key: the secret in the directory; empty if there is none, or this user cannot read it. home: the directory.
    """

    key: str
    home: Path

    @classmethod
    def of(cls, text: str, home: Path) -> FromState:
        from_state = cls(text)
        from_state.home, from_state.key = home, read_key(home)
        return from_state


def read_key(home: Path) -> str:
    """The secret of the state directory `home`; empty if there is none, or this user cannot read it."""
    try:
        return read_no_link(home / KEY_FILE)[0].strip()
    except OSError:
        return ""


def sign(key: str, nonce: str, host: str, port: int) -> str:
    """The proof: an HMAC with `key` over the nonce, and the address and port at which the connection arrived."""
    address = ipaddress.ip_address(host.partition("%")[0])
    plain = getattr(address, "ipv4_mapped", None) or address
    return hmac.new(key.encode(), f"tidegate proof 1\n{plain}\n{port}\n{nonce}".encode(), hashlib.sha256).hexdigest()


def is_proven(stream: Stream, host: str, key: str) -> bool:
    """Asks the server on a new connection for a proof, and returns whether it knows `key`. `host`: value of the Host
    header."""
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
        proof = json.loads(body).get("proof") if answer.status == 200 and answer.isclosed() else None
    except (http.client.HTTPException, ValueError, AttributeError):
        return False
    peer = stream.get_extra_info("server_addr")
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode("utf-8", "replace"), sign(key, nonce, peer[0], peer[1]).encode()
    )


class _Readable(io.RawIOBase):
    """The connection as a file object, which `http.client` reads."""

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
