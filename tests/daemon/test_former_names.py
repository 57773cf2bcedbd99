"""Names of the version before: the stall cause `dispatch` was called `scheduler`."""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path

import pytest

from tests.daemon.live import Agent, Daemon, new_run, threaded
from tidegate.wire import stall_causes
from tidegate.wire.prediction import PredictedUpdate
from tidegate.wire.step import StallRow

FORMER_STEP = (
    '{"step":7,"timestamp":1.0,"phase_seconds":{"update":1.0},'
    '"stalls":[{"phase":"update","cause":"scheduler","seconds":0.5},{"phase":"update","cause":"h2d","seconds":0.1}],'
    '"verdict":"a text with \\"cause\\":\\"scheduler\\" in it"}'
)
VERDICT = 'a text with "cause":"scheduler" in it'


def former_step(number: int) -> dict[str, object]:
    """A step as an agent of the version before reports it."""
    rows = [{"phase": "update", "cause": cause, "seconds": 0.5} for cause in ("scheduler", "h2d")]
    return {"step": number, "timestamp": time.time(), "phase_seconds": {"update": 1.0}, "stalls": rows}


def causes_shown(daemon: Daemon, run: str) -> list[list[str]]:
    """The causes of the newest step as the daemon answers them: in the run and in the list of steps."""
    last = daemon.http("GET", f"/v1/runs/{run}").json()["ranks"][0]["last_step"]
    listed = daemon.http("GET", f"/v1/runs/{run}/ranks/0/steps").json()["steps"][-1]
    return [[row["cause"] for row in step["stalls"]] for step in (last, listed)]


def test_a_report_with_the_former_name_is_shown_with_the_present_name(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    stall_causes._warn.cache_clear()
    agent = Agent(daemon, new_run())
    body = {"timestamp": time.time(), "step": 7, "phase": "forward", "generation": 0, "effective": {}}
    with caplog.at_level(logging.WARNING, "tidegate.wire.stall_causes"):
        for number in (7, 8):
            report = {**body, "step": number, "steps": [former_step(number)]}
            answer = daemon.http("POST", f"/v1/agents/{agent.id}/reports", "agent", json=report)
            assert answer.status_code == 200, answer.text
    assert causes_shown(daemon, agent.message.run) == [["dispatch", "h2d"]] * 2
    (warning,) = [row.getMessage() for row in caplog.records if row.name == "tidegate.wire.stall_causes"]
    assert "'scheduler'" in warning
    assert "'dispatch'" in warning


def test_steps_in_a_database_of_the_version_before_are_shown_with_the_present_name(tmp_path: Path) -> None:
    run = new_run()
    with threaded(tmp_path) as daemon:
        agent = Agent(daemon, run)
        agent.train(7, 1.0)
        agent.client.goodbye(agent.id)
    with sqlite3.connect(tmp_path / "tidegate.db") as connection:
        assert connection.execute("UPDATE steps SET body = ? WHERE step = 7", (FORMER_STEP,)).rowcount == 1
    with threaded(tmp_path) as daemon:
        assert causes_shown(daemon, run) == [["dispatch", "h2d"]] * 2
        (step,) = daemon.client().steps(run, 0, limit=1).steps
        assert step.verdict == VERDICT, "texts stay as they are"


def test_clients_read_what_a_daemon_of_the_version_before_answers() -> None:
    assert StallRow(phase="update", cause="scheduler", seconds=1.0).cause == "dispatch"
    assert StallRow(phase="update", cause="nvme:read", seconds=1.0).cause == "nvme:read"
    predicted = PredictedUpdate(
        update_seconds=1.0, stalls={"scheduler": 0.25, "h2d": 0.5}, lane_bytes={}, host_memory_bytes={},
        device_memory_bytes=0, bound_seconds=0.5, bound_by="h2d",
    )  # fmt: skip
    assert predicted.stalls == {"dispatch": 0.25, "h2d": 0.5}
