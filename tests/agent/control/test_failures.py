"""How a training has ended is what the daemon shows: real processes, which an exception ends or which end well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.services import ROOT, DaemonProcess, daemon_process
from tidegate.cli import tables
from tidegate.wire.run import RunView


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with daemon_process(tmp_path_factory.mktemp("failures") / "state") as made:
        yield made


def ended(daemon: DaemonProcess, how: str, *launcher: str) -> tuple[RunView, str]:
    """The run after the training has ended, and all that the daemon stores of it as text."""
    words = ["-m", "tests.agent.control.failing_rank", how, daemon.url, how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TIDEGATE_AGENT_TOKEN": daemon.token("agent")}
    subprocess.run(
        [sys.executable, *launcher, *words], cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False
    )
    with daemon.client() as client:
        return client.run(how), str(client.audit(how))


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raise", "StateGone"),
        ("with", "StateGone"),
        ("with-attachment", "StateGone"),
        ("with-exit", "SystemExit"),
        ("finally", "StateGone"),
        ("child", "StateGone"),
        ("child-exit", "SystemExit"),
    ],
)
def test_a_training_that_an_exception_ends_has_failed(daemon: DaemonProcess, how: str, error: str) -> None:
    run, audit = ended(daemon, how)
    assert run.breakdown is not None
    assert (run.liveness, run.breakdown.error, run.breakdown.step) == ("failed", error, 2)
    assert tables.verdict_now(run) == f"Failed after 2 steps: {error} on rank 0."
    assert run in tables.default_runs([run.model_copy(update={"run": "other"}), run])
    assert "secret" not in audit


@pytest.mark.parametrize("how", ["interrupt", "exit", "iterator", "handled"])
def test_a_training_that_ends_otherwise_is_finished(daemon: DaemonProcess, how: str) -> None:
    run, _ = ended(daemon, how)
    assert (run.liveness, run.breakdown, run.step) == ("finished", None, 2)


def test_of_a_torchrun_job_the_rank_that_failed_is_named(daemon: DaemonProcess) -> None:
    """The launcher ends the other one with SIGTERM, so that it cannot sign off."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run, _ = ended(daemon, "ranks", *launcher)
    assert run.breakdown is not None
    assert (run.liveness, run.breakdown.error, run.breakdown.rank) == ("failed", "StateGone", 0)
    assert [rank.liveness for rank in run.ranks] == ["failed", "live"], "until its lease ends"
