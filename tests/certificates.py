"""Certificates for tests of TLS."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def certificate_for(folder: Path, names: str) -> tuple[Path, Path]:
    """A certificate of its own, and its key; `names` as in IP:127.0.0.1,DNS:localhost."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=tidegate"),
            *("-addext", f"subjectAltName={names}", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def serving(certificate: Path, key: Path) -> ssl.SSLContext:
    """For a server that shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
