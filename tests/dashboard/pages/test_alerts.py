"""Alerts and audit: what fires, worst first, with its knob and runbook; and who did what, filtered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.dashboard.screen import again, field, page, text
from tests.dashboard.scripted import Agent, Daemon
from tests.services import until
from tidegate.dashboard.data.audit_filter import AuditFilter, change, filtered
from tidegate.dashboard.widgets.alerts import own_runbook, runbook
from tidegate.wire.audit import AuditRow

BEGIN, NEVER = "2026-03-01T10:00:00Z", "0001-01-01T00:00:00Z"


def tell(daemon: Daemon, name: str, severity: str, url: str, status: str = "firing", run: str = "llama-7b") -> None:
    labels = {"alertname": name, "severity": severity, **({"run": run} if run else {})}
    alert: dict[str, Any] = {
        "status": status, "startsAt": BEGIN, "endsAt": NEVER if status == "firing" else "2026-03-01T10:05:00Z",
        "labels": labels, "fingerprint": f"{len(name):x}",
        "annotations": {"summary": f"llama-7b: 47% <b>of</b> {name}", "knob": "tier_split", "runbook_url": url},
    }  # fmt: skip
    send(daemon, alert)


def send(daemon: Daemon, alert: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {daemon.token('alert')}"}
    body = {"version": "4", "alerts": [alert]}
    assert httpx.post(f"{daemon.url}/v1/alerts", json=body, headers=headers, trust_env=False).status_code == 200


def test_nothing_fires_and_nothing_was_done_is_told(daemon: Daemon) -> None:
    Agent(daemon).train(3)
    shown = text(page("alerts"))
    assert "Nothing fires." in shown
    assert "Resolved" not in shown
    assert "Audit log" in shown


def test_what_fires_is_shown_with_its_knob_until_it_is_resolved(daemon: Daemon) -> None:
    Agent(daemon).train(3)
    tell(daemon, "TidegateSsdWear", "info", "docs/runbooks/TidegateSsdWear.md")
    tell(daemon, "TidegateUpdateStalled", "warning", "https://example.org/stalled.md")
    tell(daemon, "TidegateDaemonDown", "critical", "", run="")
    app = page("alerts")
    shown = text(app)
    assert "UpdateStalled for" in shown
    assert "47% <b>of</b> TidegateUpdateStalled" in shown
    assert shown.index("DaemonDown for") < shown.index("UpdateStalled for") < shown.index("SsdWear for")
    assert "Knob to turn: tier_split" in shown
    html = " ".join(element.proto.body for element in app.get("html"))
    assert '<a href="https://example.org/stalled.md" target="_blank"' in html
    assert any("What it means" in element.value for element in app.markdown), "our own runbook is at hand"
    tell(daemon, "TidegateUpdateStalled", "warning", "", "resolved")
    shown = text(page("alerts"))
    assert "UpdateStalled for" not in shown
    assert "Resolved alert what resolved fired for knob runbook UpdateStalled" in shown
    assert "5 min 0 s tier_split" in shown


def test_no_text_of_an_alert_becomes_markup(daemon: Daemon) -> None:
    Agent(daemon).train(3)
    image = '<img src="x" alt="of {}">'
    notes = {name: image.format(name) for name in ("summary", "description", "knob", "runbook_url")}
    labels = {name: image.format(name) for name in ("alertname", "severity", "path")} | {"run": "llama-7b"}
    times = {"startsAt": BEGIN, "endsAt": NEVER}
    send(daemon, {"status": "firing", "labels": labels, "annotations": notes, "fingerprint": "f00d", **times})
    app = page("alerts")
    html = " ".join(element.proto.body for element in app.get("html"))
    for name in ("summary", "description", "knob", "runbook_url", "alertname", "severity"):
        assert f"of {name}" in html
    assert "<img" not in html


def test_the_audit_log_is_looked_through(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(2)
    tell(daemon, "TidegateSsdWear", "info", "")
    with agent.training(0.05), daemon.operator() as operator:
        operator.set_knobs("llama-7b", {"stride": 4}, reason="fewer crossings")
        operator.set_knobs("llama-7b", {"static_ratio": 0.25}, reason="more room")
        until(lambda: agent.generation == 2, "generation 2")
    app = page("alerts")
    shown = text(app)
    assert "stride auto → 4 fewer crossings" in shown
    assert "SsdWear, turn tier_split" in shown
    field(app, "Words").input("crossings PROPOSED")
    shown = text(again(app))
    assert "1 of" in shown
    assert "more room" not in shown
    assert app.query_params["q"] in ("crossings PROPOSED", ["crossings PROPOSED"])
    field(app, "Words").input("nobody ever said this")
    assert "No row says that." in text(again(app))
    linked = text(page("alerts", what="alert_firing"))
    assert "SsdWear, turn tier_split" in linked
    assert "fewer crossings" not in linked


def row(number: int, action: str, actor: str, reason: str = "", **knobs: float | str) -> AuditRow:
    before = {"stride": "auto", "static_ratio": 0.0}
    return AuditRow(id=number, timestamp=float(number), actor=actor, action=action, run="r", generation=number,
                    before=before, after={**before, **knobs}, reason=reason)  # fmt: skip


ROWS = (
    row(1, "proposed", "ana", "Fewer crossings", stride=4.0),
    row(2, "committed", "daemon", stride=4.0),
    row(3, "proposed", "ben", "more room", static_ratio=0.5),
)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (AuditFilter(), [3, 2, 1]),
        (AuditFilter(text="fewer CROSSINGS"), [1]),
        (AuditFilter(text="stride"), [2, 1]),
        (AuditFilter(text="generation 3"), [3]),
        (AuditFilter(actions=frozenset({"proposed"})), [3, 1]),
        (AuditFilter(actions=frozenset({"proposed"}), actor="ana"), [1]),
        (AuditFilter(actor="nobody"), []),
    ],
)
def test_a_filter_takes_what_all_of_its_parts_take(wanted: AuditFilter, found: list[int]) -> None:
    assert [row.id for row in filtered(ROWS, wanted)] == found


def test_a_row_shows_what_is_different_after_it() -> None:
    assert change(ROWS[0]) == "stride auto → 4"
    assert change(row(4, "proposed", "ana")) == ""


@pytest.mark.parametrize("url", ["javascript:alert(1)", "docs/runbooks/X.md", "", "data:text/html,x", "HTTPS ://x"])
def test_only_addresses_of_the_web_are_links(url: str) -> None:
    assert "<a" not in runbook(url)


def test_a_link_cannot_leave_its_attribute() -> None:
    assert runbook('https://x/"onclick="y') == (
        '<a href="https://x/&quot;onclick=&quot;y" target="_blank" rel="noreferrer">runbook</a>'
    )


@pytest.mark.parametrize(
    "url",
    ["docs/runbooks/../../pyproject.toml", "docs/runbooks/None.md", "/etc/passwd", "", "docs/runbooks/README.md\n"],
)
def test_only_our_own_runbooks_are_read(url: str) -> None:
    assert own_runbook(url) is None
