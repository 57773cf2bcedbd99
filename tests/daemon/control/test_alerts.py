"""Alertmanager's webhook: what is written down, what is told again, and what is no message of its."""

from __future__ import annotations

import itertools
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.live import Agent, Daemon, new_run, threaded, wait_until
from tidegate.daemon.control import alerts as book
from tidegate.daemon.storage.store import Store
from tidegate.errors import NotFound
from tidegate.wire.alert import AlertView

BEGIN, LATER, END = "2026-03-01T10:00:00.123456789Z", "2026-03-01T11:00:00Z", "2026-03-01T10:05:00.5Z"
NEVER = "0001-01-01T00:00:00Z"


def fingerprint() -> str:
    return uuid.uuid4().hex[:16]


def alert(run: str | None, name: str = "TidegateUpdateStalled", **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "status": "firing",
        "labels": {"alertname": name, "severity": "warning", "cause": "nvme:read", **({"run": run} if run else {})},
        "annotations": {
            "summary": "waits 47% of its time for nvme:read", "description": "Slower than need be.",
            "knob": "tier_split", "runbook_url": f"docs/runbooks/{name}.md",
        },
        "startsAt": BEGIN, "endsAt": NEVER, "fingerprint": fingerprint(), "generatorURL": "http://prometheus/graph",
    }  # fmt: skip
    return {**made, **more}


def message(*alerts: dict[str, Any]) -> dict[str, Any]:
    """As Alertmanager 0.25 sends it."""
    return {
        "receiver": "tidegate-daemon", "status": "firing", "alerts": list(alerts), "groupLabels": {},
        "commonLabels": {}, "commonAnnotations": {}, "externalURL": "http://alertmanager", "version": "4",
        "groupKey": "{}:{}", "truncatedAlerts": 0,
    }  # fmt: skip


def tell(daemon: Daemon, *alerts: dict[str, Any]) -> dict[str, int]:
    answer = daemon.http("POST", "/v1/alerts", "alert", json=message(*alerts))
    assert answer.status_code == 200, answer.text
    told: dict[str, int] = answer.json()
    return told


def receipt(**counts: int) -> dict[str, int]:
    return {"changed": 0, "repeated": 0, "late": 0, "unknown_run": 0, "over_quota": 0, **counts}


def rows(daemon: Daemon, run: str) -> list[str]:
    return [row.action for row in daemon.client().audit(run) if row.action.startswith("alert")]


def test_an_alert_is_written_down_once_and_shown_until_it_is_resolved(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client("read")
    Agent(daemon, run)
    fired = alert(run)
    assert tell(daemon, fired) == receipt(changed=1)
    (shown,) = client.alerts(run)
    assert (shown.alert, shown.state, shown.severity, shown.knob) == (
        "TidegateUpdateStalled", "firing", "warning", "tier_split",
    )  # fmt: skip
    assert shown.labels["cause"] == "nvme:read"
    assert shown.starts_at == pytest.approx(1772359200.123)
    assert shown.ends_at is None
    (row,) = [row for row in client.audit(run) if row.action == "alert_firing"]
    assert (row.actor, row.reason) == ("alert", "waits 47% of its time for nvme:read")

    again = {**fired, "annotations": {**fired["annotations"], "summary": "waits 60% of its time"}}
    assert tell(daemon, again) == receipt(repeated=1)
    assert [a.summary for a in client.alerts(run)] == ["waits 60% of its time"]
    assert rows(daemon, run) == ["alert_firing"]

    resolved = {**fired, "status": "resolved", "endsAt": END}
    assert tell(daemon, resolved) == receipt(changed=1)
    assert tell(daemon, resolved) == receipt(repeated=1)
    (shown,) = client.alerts(run)
    assert (shown.state, shown.ends_at) == ("resolved", pytest.approx(1772359500.5))
    assert daemon.http("GET", f"/v1/runs/{run}/alerts?state=firing").json() == []
    assert rows(daemon, run) == ["alert_firing", "alert_resolved"]


def test_what_fires_again_is_news_and_what_comes_late_is_not(daemon: Daemon) -> None:
    run = new_run()
    Agent(daemon, run)
    first = alert(run)
    second = {**first, "startsAt": LATER}
    assert tell(daemon, first, {**first, "status": "resolved", "endsAt": END}) == receipt(changed=2)
    assert tell(daemon, first) == receipt(changed=1), "Alertmanager had lost sight of it: the same start, firing again"
    assert tell(daemon, second) == receipt(changed=1)
    assert tell(daemon, {**first, "status": "resolved", "endsAt": END}) == receipt(late=1)
    (shown,) = daemon.client().alerts(run)
    assert shown.state == "firing"


def test_alerts_of_no_run_and_of_runs_that_nobody_knows(daemon: Daemon) -> None:
    run = new_run()
    Agent(daemon, run)
    down = alert(None, "TidegateDaemonDown")
    assert tell(daemon, down, alert("no-such-run"), alert(run)) == receipt(changed=2, unknown_run=1)
    assert down["fingerprint"] in [a["fingerprint"] for a in daemon.http("GET", "/v1/alerts").json()]
    assert len(daemon.client().alerts(run)) == 1
    with pytest.raises(NotFound, match="no run 'no-such-run'"):
        daemon.client().alerts("no-such-run")


def test_one_question_tells_what_fires_anywhere(daemon: Daemon) -> None:
    runs = [Agent(daemon, new_run()).message.run for _ in range(2)]
    mine = [alert(run) for run in (*runs, None)]
    over = alert(runs[0], status="resolved", endsAt=END)
    tell(daemon, *mine, over)
    ours = {told["fingerprint"] for told in (*mine, over)}
    found = {told.fingerprint: told.run for told in daemon.client().firing() if told.fingerprint in ours}
    assert found == {told["fingerprint"]: told["labels"].get("run", "") for told in mine}
    every = daemon.http("GET", "/v1/alerts?runs=all", "read").json()
    assert {told["fingerprint"] for told in every} >= ours


def test_an_event_tells_the_screens(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    Agent(daemon, run)
    tell(daemon, alert(run))
    events = itertools.islice(client.events(run, last_event_id=0), 2)
    assert [event.data["alert"] for event in events if event.kind == "alert"] == ["TidegateUpdateStalled"]


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ({}, "version"),
        ({**message(), "version": "3"}, "version"),
        ({**message(), "alerts": {}}, "alerts"),
        (message({"status": "firing"}), "labels"),
        (message(alert("r", status="suppressed")), "status"),
        (message(alert("r", startsAt="yesterday")), "startsAt"),
        (message(alert("r", startsAt="2026-03-01T10:00:00")), "startsAt"),
        (message(alert("r", fingerprint="../../etc")), "fingerprint"),
        (message(alert("r", labels={"alertname": 7})), "labels"),
        (message(*[alert("r")] * 1_001), "alerts"),
    ],
)
def test_what_is_no_message_of_alertmanager_is_refused(daemon: Daemon, body: Any, at: str) -> None:
    answer = daemon.http("POST", "/v1/alerts", "alert", json=body)
    assert answer.status_code == 422, answer.text
    assert at in answer.json()["detail"]


@pytest.mark.parametrize("scope", ["read", "operate", "agent"])
def test_only_the_webhook_may_tell(daemon: Daemon, scope: str) -> None:
    assert daemon.http("POST", "/v1/alerts", scope, json=message()).status_code == 403
    assert daemon.http("GET", "/v1/alerts", "alert").status_code == 403


def test_long_texts_are_cut_and_strange_ones_stay_texts(daemon: Daemon) -> None:
    run = new_run()
    Agent(daemon, run)
    labels = {"run": run, "alertname": "x" * 300, **{f"label{i}": "\u2028<b>" * 100 for i in range(60)}}
    annotations = {"summary": "\0" + "s" * 5_000, "runbook_url": "javascript:" + "u" * 900, "knob": "k" * 99}
    assert tell(daemon, alert(run, labels=labels, annotations=annotations)) == receipt(changed=1)
    (shown,) = daemon.client().alerts(run)
    assert (len(shown.alert), len(shown.summary), len(shown.knob), len(shown.runbook_url)) == (64, 2_000, 64, 500)
    assert len(shown.labels) == 32
    assert daemon.client().audit(run)[-1].reason == "s" * 2_000


def test_what_is_kept_is_bounded_and_what_finds_no_room_is_not_written_down(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "FIRING_KEPT", 3)
    monkeypatch.setattr(book, "RESOLVED_KEPT", 2)
    run = new_run()
    Agent(daemon, run)
    starts = [f"2026-03-01T10:00:{second:02}Z" for second in range(10)]
    firing = [alert(run, startsAt=at) for at in starts[:5]]
    resolved = [alert(run, status="resolved", startsAt=at, endsAt=END) for at in starts[5:]]
    assert tell(daemon, *firing, *resolved) == receipt(changed=5, over_quota=5)
    states = [a.state for a in daemon.client().alerts(run)]
    assert (states.count("firing"), states.count("resolved")) == (3, 2)
    kept = {a.fingerprint for a in daemon.client().alerts(run) if a.state == "firing"}
    assert kept == {a["fingerprint"] for a in firing[:3]}
    assert len(rows(daemon, run)) == 5
    over = {**firing[0], "status": "resolved", "startsAt": starts[9], "endsAt": BEGIN}
    assert tell(daemon, over) == receipt(changed=1), "what became of one that was written down is written down"
    assert tell(daemon, firing[3]) == receipt(changed=1), "there is room again"


@pytest.mark.parametrize("at_once", [True, False])
def test_of_the_equally_bad_the_first_told_stay(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """Whatever their fingerprints."""
    monkeypatch.setattr(book, "FIRING_KEPT", 3)
    run = new_run()
    Agent(daemon, run)
    told = [alert(run, fingerprint=f"{0xFFFF - number:04x}") for number in range(5)]
    if at_once:
        assert tell(daemon, *told) == receipt(changed=3, over_quota=2)
    else:
        expected = [receipt(changed=1)] * 3 + [receipt(over_quota=1)] * 2
        assert [tell(daemon, one) for one in told] == expected
    kept = {a["fingerprint"] for a in told[:3]}
    assert {a.fingerprint for a in daemon.client().alerts(run)} == kept
    assert len(rows(daemon, run)) == 3
    assert tell(daemon, *told[::-1]) == receipt(repeated=3, over_quota=2)
    assert {a.fingerprint for a in daemon.client().alerts(run)} == kept


def test_what_a_worse_one_displaces_is_counted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "FIRING_KEPT", 3)
    run = new_run()
    Agent(daemon, run)
    first, second, third = (alert(run) for _ in range(3))
    assert tell(daemon, first, second, third) == receipt(changed=3)
    worse = alert(run, labels={"alertname": "TidegateAgentLost", "severity": "critical", "run": run})
    assert tell(daemon, worse) == receipt(changed=1, over_quota=1)
    assert [a.fingerprint for a in daemon.client().alerts(run)][:1] == [worse["fingerprint"]]
    assert third["fingerprint"] not in {a.fingerprint for a in daemon.client().alerts(run)}
    assert tell(daemon, third) == receipt(over_quota=1)


def test_what_fires_again_displaces_none_that_is_as_bad(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "FIRING_KEPT", 3)
    run = new_run()
    Agent(daemon, run)
    again, *others = (alert(run) for _ in range(4))
    tell(daemon, again, {**again, "status": "resolved", "endsAt": END}, *others)
    assert tell(daemon, again) == receipt(changed=1, over_quota=1), "told, since what became of it is, and not kept"
    assert {a.fingerprint for a in daemon.client().alerts(run)} == {a["fingerprint"] for a in others}


def junk(run: str | None, count: int, severity: str = "critical") -> list[dict[str, Any]]:
    return [
        alert(
            run, startsAt=LATER, labels={"alertname": f"Junk{n}", "severity": severity, **({"run": run} if run else {})}
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("of_run", [True, False])
def test_later_alerts_hide_none_that_is_as_bad(tmp_path: Path, of_run: bool) -> None:
    """However many come, and over a restart: longer ago than the rows that are read of the audit log."""
    with threaded(tmp_path) as daemon:
        run = Agent(daemon, new_run()).message.run if of_run else None
        labels = {"alertname": "TidegateAgentLost", "severity": "critical", **({"run": run} if run else {})}
        fired = alert(run, labels=labels)
        tell(daemon, alert(run))
        tell(daemon, fired)
        for severity in ("critical", "odd", "warning"):
            tell(daemon, *junk(run, 250, severity))
        for _ in range(3):
            told = junk(run, 1_000)
            tell(daemon, *[{**one, "status": "resolved", "endsAt": "2026-03-01T11:30:00Z"} for one in told])
        for asked in ("first", "again"):
            found = daemon.client().alerts(run)
            assert found[0].fingerprint == fired["fingerprint"], asked
            assert [a.severity for a in found if a.state == "firing"] == ["critical"] * 200
            assert len(found) == 200 + 50
            assert daemon.client().firing()[0].fingerprint == fired["fingerprint"]
    with threaded(tmp_path) as daemon:
        assert [a.fingerprint for a in daemon.client().alerts(run)] == [a.fingerprint for a in found]


def test_a_token_has_room_for_its_alerts_whatever_others_tell(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon:
        run = Agent(daemon, new_run()).message.run
        daemon.tokens["ours"] = daemon.app.state.plane.store.tokens.issue("alert", "ours")
        wait_until(lambda: daemon.http("POST", "/v1/alerts", "ours", json=message()).status_code == 200, "the token")
        for _ in range(2):
            tell(daemon, *[{**one, "startsAt": BEGIN} for one in junk(run, 300)])
        ours = alert(run)
        assert daemon.http("POST", "/v1/alerts", "ours", json=message(ours)).json() == receipt(changed=1)
        assert ours["fingerprint"] in [a.fingerprint for a in daemon.client().alerts(run)]


def test_alerts_of_all_runs_of_a_token_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "KEPT_OF_A_TOKEN", 100)
    with threaded(tmp_path) as daemon:
        runs = [Agent(daemon, new_run()).message.run for _ in range(3)]
        for run in runs:
            tell(daemon, *junk(run, 60))
        assert len(daemon.client().firing()) == 100


def test_what_was_resolved_is_forgotten_after_a_week(tmp_path: Path) -> None:
    now, store = [1_800_000_000.0], Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    made = book.AlertRegistry(store, lambda: now[0])
    view = AlertView(run="", fingerprint="0a", alert="A", state="firing", starts_at=1.0, received_at=now[0])
    over = view.model_copy(update={"fingerprint": "0b", "state": "resolved", "ends_at": 2.0})
    made.record([view, over], "alert")
    now[0] += book.RESOLVED_SECONDS - 1
    assert [a.fingerprint for a in book.AlertRegistry(store, lambda: now[0]).of("")] == ["0a", "0b"]
    now[0] += 2
    assert made.of("") == book.AlertRegistry(store, lambda: now[0]).of("") == [view]
    made.record([view], "alert")
    assert [known.view for known in store.alerts.all()] == [view]
    store.close()


def test_alerts_outlive_the_daemon(tmp_path: Path) -> None:
    run = new_run()
    with threaded(tmp_path) as first:
        Agent(first, run)
        stays, goes = alert(run), alert(run)
        tell(first, stays, goes)
        tell(first, {**goes, "status": "resolved", "endsAt": END})
        before = first.client().alerts(run)
    with threaded(tmp_path) as second:
        assert second.client().alerts(run) == before
        assert [a.state for a in before] == ["firing", "resolved"]
        assert tell(second, stays) == receipt(repeated=1)
