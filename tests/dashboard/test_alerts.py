"""What fires is beside the knobs, worst first, and gone when it is resolved."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.dashboard.screen import page, text
from tests.dashboard.scripted import Agent, Daemon
from tidegate.dashboard.parts.alerts import runbook

BEGIN, NEVER = "2026-03-01T10:00:00Z", "0001-01-01T00:00:00Z"


def tell(daemon: Daemon, name: str, severity: str, url: str, status: str = "firing") -> None:
    alert: dict[str, Any] = {
        "status": status, "startsAt": BEGIN, "endsAt": NEVER if status == "firing" else "2026-03-01T10:05:00Z",
        "labels": {"alertname": name, "severity": severity, "run": "llama-7b"}, "fingerprint": f"{len(name):x}",
        "annotations": {"summary": f"llama-7b: 47% <b>of</b> {name}", "knob": "tier_split", "runbook_url": url},
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {daemon.token('alert')}"}
    body = {"version": "4", "alerts": [alert]}
    assert httpx.post(f"{daemon.url}/v1/alerts", json=body, headers=headers, trust_env=False).status_code == 200


def test_what_fires_is_shown_with_its_knob_until_it_is_resolved(daemon: Daemon) -> None:
    Agent(daemon).train(3)
    assert "as Alertmanager tells" not in text(page("alerts"))
    tell(daemon, "TidegateSsdWear", "info", "docs/runbooks/TidegateSsdWear.md")
    tell(daemon, "TidegateUpdateStalled", "warning", "https://example.org/stalled.md")
    app = page("alerts")
    shown = text(app)
    assert "Alerts as Alertmanager tells" in shown
    assert "UpdateStalled 47% <b>of</b> TidegateUpdateStalled" in shown
    assert shown.index("UpdateStalled 47%") < shown.index("SsdWear 47%")
    assert "tier_split docs/runbooks/TidegateSsdWear.md" in shown
    html = " ".join(element.proto.body for element in app.get("html"))
    assert '<a href="https://example.org/stalled.md" target="_blank"' in html
    tell(daemon, "TidegateUpdateStalled", "warning", "", "resolved")
    shown = text(page("alerts"))
    assert "UpdateStalled" not in shown
    assert "SsdWear" in shown


@pytest.mark.parametrize("url", ["javascript:alert(1)", "docs/runbooks/X.md", "", "data:text/html,x", "HTTPS ://x"])
def test_only_addresses_of_the_web_are_links(url: str) -> None:
    assert "<a" not in runbook(url)


def test_a_link_cannot_leave_its_attribute() -> None:
    assert runbook('https://x/"onclick="y') == (
        '<a href="https://x/&quot;onclick=&quot;y" target="_blank" rel="noreferrer">runbook</a>'
    )
