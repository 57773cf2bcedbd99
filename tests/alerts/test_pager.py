"""What the committed configuration of Alertmanager tells, and when: a real Alertmanager, in faster time."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services import Alertmanager, alertmanager, until

Message = dict[str, Any]


@contextlib.contextmanager
def listener() -> Iterator[tuple[int, list[Message]]]:
    """The port of a server in the daemon's place, and the messages that came."""
    heard: list[Message] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, heard
        server.shutdown()


@pytest.fixture
def heard_by(tmp_path: Path) -> Iterator[tuple[Alertmanager, list[Message]]]:
    (tmp_path / "token").write_text("secret")
    with listener() as (port, heard), alertmanager(tmp_path / "manager", port, tmp_path / "token") as manager:
        yield manager, heard


def alert(name: str, severity: str, *, ends: bool = False, **labels: str) -> Message:
    found: Message = {"labels": {"alertname": name, "severity": severity, **labels}}
    return found | ({"endsAt": datetime.now(UTC).isoformat()} if ends else {})


def post(manager: Alertmanager, *alerts: Message) -> None:
    """Sends alerts as Prometheus does: those of one evaluation in one request, in this order."""
    httpx.post(f"{manager.url}/api/v2/alerts", json=alerts, trust_env=False).raise_for_status()


def told(heard: list[Message], name: str) -> list[str]:
    """States of the alert in the order in which they were told."""
    return [a["status"] for message in heard for a in message["alerts"] if a["labels"]["alertname"] == name]


def test_a_critical_alert_is_told_for_itself_beside_others_of_its_run(
    heard_by: tuple[Alertmanager, list[Message]],
) -> None:
    manager, heard = heard_by
    post(manager, alert("TidegatePathSlow", "warning", run="llama"))
    until(lambda: told(heard, "TidegatePathSlow"), "the warning", 20)
    post(manager, alert("TidegateAgentLost", "critical", run="llama"))
    until(lambda: told(heard, "TidegateAgentLost") == ["firing"], "the critical alert", 20)
    post(manager, alert("TidegateAgentLost", "critical", ends=True, run="llama"))
    until(lambda: told(heard, "TidegateAgentLost") == ["firing", "resolved"], "its end", 20)
    own = [message for message in heard if message["groupLabels"].get("alertname") == "TidegateAgentLost"]
    assert [message["groupLabels"] for message in own] == [{"alertname": "TidegateAgentLost", "run": "llama"}] * 2
    assert all(len(message["alerts"]) == 1 for message in own)


def test_one_lost_rank_is_not_told_where_all_are_lost(heard_by: tuple[Alertmanager, list[Message]]) -> None:
    """Both come with one evaluation, the cause last."""
    manager, heard = heard_by
    post(
        manager,
        alert("TidegateAgentLost", "critical", run="llama"),
        alert("TidegateAllAgentsLost", "critical", run="llama"),
    )
    until(lambda: told(heard, "TidegateAllAgentsLost"), "the alert", 20)
    time.sleep(0.5)
    assert told(heard, "TidegateAgentLost") == []
