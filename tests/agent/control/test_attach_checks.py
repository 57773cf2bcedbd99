"""A rank whose metrics only its own host reaches says so, where the daemon is on another."""

from __future__ import annotations

import logging
import socket

import psutil
import pytest

from tidegate.agent.control.attach_checks import AttachSettings, warn_if_unreachable

OWN_ADDRESS = next(
    (
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ),
    "127.0.0.1",
)
"""One that other hosts reach, if this host has any."""


@pytest.mark.parametrize(
    ("daemon", "metrics_address", "warns"),
    [
        ("http://control.example.org:8790", "127.0.0.1:9464", True),
        ("http://control.example.org:8790", "0.0.0.0:9464", True),
        ("http://192.0.2.1:8790", "localhost:9464", True),
        ("http://[2001:db8::1]:8790", "[::1]:9464", True),
        ("http://control.example.org:8790", "node-7.example.org:9464", False),
        ("http://control.example.org:8790", "192.0.2.7:9464", False),
        ("http://127.0.0.1:8790", "127.0.0.1:9464", False),
        ("http://localhost:8790", "127.0.0.1:9464", False),
        (f"http://{OWN_ADDRESS}:8790", "127.0.0.1:9464", False),
        (f"http://{socket.gethostname().upper()}:8790", "127.0.0.1:9464", False),
        ("http://alias-of-this-host.example.org:8790", "127.0.0.1:9464", False),
        ("http://no-such-host.invalid:8790", "127.0.0.1:9464", True),
        (None, "127.0.0.1:9464", False),
    ],
)
def test_metrics_that_the_daemons_host_does_not_reach(
    daemon: str | None,
    metrics_address: str,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve = socket.getaddrinfo
    known = {"control.example.org": "192.0.2.1", "alias-of-this-host.example.org": OWN_ADDRESS}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **given: resolve(known.get(host, host), *more, **given)
    )
    with caplog.at_level(logging.WARNING, logger="tidegate"):
        warn_if_unreachable(AttachSettings(run="r", daemon=daemon), metrics_address)
    found = [record for record in caplog.records if getattr(record, "event", "") == "metrics_unreachable"]
    assert len(found) == warns
    for record in found:
        assert metrics_address in record.getMessage()
        assert str(daemon) in record.getMessage()
