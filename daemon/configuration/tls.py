"""TLS certificate: loads it, and checks at start that clients will accept it for the daemon's host names."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from tidegate.errors import DaemonError


def load_certificate(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """The server's SSL context; DaemonError when certificate and key cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "strerror", None) or str(error)
        raise DaemonError(
            f"The certificate {certificate} cannot be used{f' with the key {key}' if key else ''}: {why}."
        ) from error
    return context


def refusal_reason(certificate: Path, key: Path | None, name: str) -> str:
    """The reason why a client that trusts the certificate refuses it for `name`; empty if the client accepts it.

    `name` is a host name or an address. A TLS handshake in memory finds the reason, so the check is that of a real
    client. DaemonError when certificate and key cannot be used.
    """
    server_context = load_certificate(certificate, key)
    client_context = ssl.create_default_context(cafile=str(certificate))
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    try:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                return ""
            with contextlib.suppress(ssl.SSLWantReadError):
                server.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (ssl.SSLError, ValueError) as error:
        return str(error)
