"""Agents that are refused: the daemon counts them, and says where they are and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.daemon.live import Daemon, file_tokens, hello, new_run, threaded, wait_until
from tidegate.client.daemon_client import DaemonClient
from tidegate.daemon.security import refused_agents
from tidegate.daemon.security.refused_agents import MAX_KEPT, RefusedAgentsBook
from tidegate.metrics.family import AGENT_REFUSALS
from tidegate.wire.agent import AgentRefusal


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    with threaded(tmp_path) as running:
        yield running


def counted(daemon: Daemon) -> dict[str, float]:
    lines = daemon.http("GET", "/metrics", None).text.splitlines()
    rows = [line.partition("} ") for line in lines if line.startswith("tidegate_refused_agents{")]
    return {name.partition('"')[2].strip('"'): float(value) for name, _, value in rows}


def test_a_refused_agent_is_counted_and_named(own_daemon: Daemon) -> None:
    daemon, run = own_daemon, new_run()
    assert counted(daemon) == dict.fromkeys(AGENT_REFUSALS, 0.0)
    table = daemon.app.state.plane.store.tokens
    of_another = table.issue("agent", "other", run="another")
    with DaemonClient(daemon.url, of_another) as other:
        wait_until(lambda: other.runs() == [], "the token")
    message = hello(run).model_dump(mode="json")
    for token in ("wrong", file_tokens(daemon.state)["operate"], of_another, None):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        assert daemon.http("POST", "/v1/agents", None, json=message, headers=headers).status_code in (401, 403)
    daemon.http("GET", "/v1/runs", None, headers={"Authorization": "Bearer wrong"})  # no agent
    found = daemon.client("read").refused_agents()
    reasons = {"wrong-token", "wrong-scope", "wrong-run", "no-token"}
    assert {one.reason for one in found} == reasons
    assert {one.address for one in found} == {"127.0.0.1"}
    assert all(abs(one.since - time.time()) < 60 for one in found)
    assert counted(daemon) == {reason: float(reason in reasons) for reason in AGENT_REFUSALS}
    (wrong,) = (one.sentence for one in found if one.reason == "wrong-token")
    assert wrong.startswith("Agents at 127.0.0.1 are refused, because the daemon does not know their token: ")
    assert "TIDEGATE_AGENT_TOKEN" in wrong


def test_a_token_of_one_run_is_told_nothing(own_daemon: Daemon) -> None:
    token = own_daemon.app.state.plane.store.tokens.issue("read", "one", run="llama")
    with DaemonClient(own_daemon.url, token) as client:
        wait_until(lambda: client.runs() == [], "the token")
        assert client.refused_agents() == []


def test_what_is_kept_is_bounded_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_agents, "KEPT_SECONDS", 0.2)
    book = RefusedAgentsBook()
    for number in range(2 * MAX_KEPT):
        book.note(f"10.0.0.{number}", "wrong-token")
    assert 0 < len(book.current()) <= MAX_KEPT
    wait_until(lambda: not book.current(), "the end of all")


def test_the_metric_has_all_reasons() -> None:
    assert get_args(AgentRefusal) == AGENT_REFUSALS
