"""What agents may say and should not: malformed, huge, deep, of another version, said before. All refused clearly."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.daemon.live import Agent, Daemon, Process, hello, new_run, step_report
from tests.examples import examples
from tidegate.client.daemon_client import MAX_BODY_BYTES
from tidegate.wire.agent import AgentReport

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
REPORT = AgentReport(
    timestamp=1.0, step=1, phase="update", generation=0, effective={}, steps=(step_report(1),)
).model_dump(mode="json")
HELLO = hello("fuzzed").model_dump(mode="json")


@pytest.fixture(scope="module")
def agent(daemon: Daemon) -> Agent:
    return Agent(daemon, new_run())


def paths(agent: Agent) -> dict[str, dict[str, Any]]:
    at = f"/v1/agents/{agent.id}"
    return {
        "/v1/agents": HELLO,
        f"{at}/reports": REPORT,
        f"{at}/votes": {"generation": 1, "can": True, "reason": ""},
    }


def refused(daemon: Daemon, path: str, body: bytes) -> None:
    """A problem, and never one of ours."""
    answer = daemon.http("POST", path, "agent", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (path, body[:200], answer.text)
    if answer.is_error:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["detail"]
        assert len(answer.content) < 20_000


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_anything_in_any_field(daemon: Daemon, agent: Agent, data: st.DataObject) -> None:
    path, good = data.draw(st.sampled_from(sorted(paths(agent).items(), key=lambda pair: pair[0])))
    body = dict(good)
    for name in data.draw(st.sets(st.sampled_from(sorted(good)), max_size=3)):
        body[name] = data.draw(JSON)
    if path == "/v1/agents":
        body["run"] = "fuzzed"
    refused(daemon, path, json.dumps(body).encode())


BROKEN = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "not even text": b"\xff\xfe\x00",
    "deep": b"[" * 400_000,
    "deep inside": b'{"timestamp": 1.0, "step": 1, "effective": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "a long number": b'{"timestamp": ' + b"9" * 100_000 + b"}",
    "infinite": b'{"timestamp": Infinity, "step": NaN}',
    "the same key a thousand times": b"{" + b'"step": 1,' * 1000 + b'"step": 2}',
    "as large as may be": b'{"phase": "' + b"x" * (MAX_BODY_BYTES - 20) + b'"}',
    "too large": b"x" * (MAX_BODY_BYTES + 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bodies_that_are_broken(daemon: Daemon, agent: Agent, name: str) -> None:
    for path in paths(agent):
        answer = daemon.http("POST", path, "agent", content=BROKEN[name], headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 413, 422), (path, answer.text[:300])
        assert answer.headers["content-type"] == "application/problem+json"
        assert len(answer.content) < 20_000, "it repeats what it was sent"


def test_another_version_says_which(daemon: Daemon) -> None:
    answer = daemon.http("POST", "/v1/agents", "agent", json={**HELLO, "protocol": 1})
    assert (answer.status_code, answer.json()["type"]) == (400, "wrong-protocol")
    assert "protocol 1, the daemon 2: install the same version" in answer.json()["detail"]


def test_a_report_of_the_past_is_refused(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    at = f"/v1/agents/{agent.id}/reports"

    def say(timestamp: float, step: int) -> int:
        report = {**REPORT, "timestamp": timestamp, "step": step, "steps": []}
        return daemon.http("POST", at, "agent", json=report).status_code

    assert [say(10.0, 5), say(11.0, 6)] == [200, 200]
    assert say(11.0, 6) == 200, "the same again: its answer was lost"
    assert say(10.0, 5) == 409
    assert daemon.client().run(agent.message.run).step == 6
    assert say(5.0, 7) == 200, "its clock was set back"
    assert say(12.0, 3) == 200, "training went back to a checkpoint"


@pytest.mark.parametrize("skew", [-86_400.0, 86_400.0])
def test_clocks_that_are_wrong(daemon: Daemon, skew: float) -> None:
    """Liveness is what the daemon's own clock says, whatever the agent's does."""
    run = new_run()
    agent = Agent(daemon, run, started_at=time.time() + skew)
    agent.say(timestamp=time.time() + skew)
    view = daemon.client().run(run)
    assert (view.liveness, abs(view.last_seen - time.time()) < 60) == ("live", True)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """The largest reports that are taken, again and again: what is kept of them does not grow."""
    with Process(tmp_path) as process:
        daemon = process.start()
        agent = Agent(daemon, "large")
        many = {f"{'x' * 50}{n:03}": 1.0 for n in range(120)}
        assert process.process is not None

        def say(rounds: int) -> int:
            for _ in range(rounds):
                first = agent.step + 1
                agent.step += 64
                steps = [step_report(n).model_copy(update={"cpu_seconds": many}) for n in range(first, agent.step + 1)]
                agent.say(steps=tuple(steps))
                time.sleep(0.05)  # what is told within a second waits in memory to be written
            return resident_bytes(process.process.pid)  # type: ignore[union-attr]

        before = say(24)  # what waits to be written, and what SQLite caches, has its size by then
        after = say(48)
        assert len(agent.client.steps("large", 0, limit=256).steps) == 256
        assert after - before < 16_000_000, f"{before:,} bytes, then {after:,}"


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
