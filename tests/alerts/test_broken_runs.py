"""A run that failed or was lost pages somebody until a new start has done a step: real processes and services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import (
    ROOT,
    Alertmanager,
    DaemonProcess,
    Prometheus,
    alertmanager,
    daemon_process,
    prometheus,
    until,
)

RUN = "llama"


def train(daemon: DaemonProcess, how: str) -> None:
    command = [sys.executable, "-m", "tests.agent.control.failing_rank", RUN, daemon.url, how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TIDEGATE_AGENT_TOKEN": daemon.token("agent")}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False)


def since(prom: Prometheus, alert: str) -> str:
    """When the alert that fires has begun; empty while it does not fire."""
    return next((str(one["activeAt"]) for one in prom.alerts(alert, "firing")), "")


def steps(daemon: DaemonProcess) -> int:
    with daemon.client() as client:
        return client.run(RUN).step


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("how", "alert"), [("raise", "TidegateRunFailed"), ("kill", "TidegateAllAgentsLost")])
def test_a_start_that_fails_before_a_step_is_no_end_of_the_alert(tmp_path: Path, how: str, alert: str) -> None:
    with (
        daemon_process(tmp_path / "state", "tests.alerts.hasty_daemon") as daemon,
        alertmanager(tmp_path / "alertmanager", daemon.port, tmp_path / "state" / "alert.token") as manager,
        prometheus(tmp_path / "prometheus", daemon.port, manager.url) as prom,
    ):
        train(daemon, how)
        began = until(lambda: since(prom, alert), "the alert", 60)
        until(lambda: told(manager, alert), "the alert at the pager", 30)
        train(daemon, "before a step")
        (failed,) = until(lambda: named(prom, "StateGone", 0, daemon), "the second failure", 30)
        assert "StateGone" in failed["annotations"]["summary"]
        assert since(prom, alert) == began, "without an end between"
        train(daemon, "handled")
        until(lambda: not since(prom, alert) and not since(prom, "TidegateRunFailed"), "the end", 30)
        assert steps(daemon) == 2


def told(manager: Alertmanager, alert: str) -> bool:
    return manager.states(alert) == ["active"]


def named(prom: Prometheus, error: str, step: int, daemon: DaemonProcess) -> list[dict[str, object]]:
    """The alert that the training has failed, once the run's failure is one at that step."""
    with daemon.client() as client:
        known = client.run(RUN).breakdown
    assert known is not None
    return prom.alerts("TidegateRunFailed", "firing") if (known.error, known.step) == (error, step) else []
