"""torchrun starts a job again whose rank raised or was killed: no restart is lost to the one before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.agent.control.restarted_ranks import FAILS_AT, LR, STEPS, loss_of, network
from tests.services import ROOT, daemon_process

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each start has a store of its own. In the shared one a rank may find the address that its peer had before the
restart, and gloo gives up on it (pytorch/pytorch issue 135712)."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_torchrun_restarts_go_on(tmp_path: Path, how: str) -> None:
    with daemon_process(tmp_path / "state") as daemon, daemon.client() as client:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3",
            "-m", "tests.agent.control.restarted_ranks", daemon.url, daemon.token("agent"), how, str(tmp_path),
        ]  # fmt: skip
        environment = {**os.environ, **OWN_STORE, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-9000:]
        view = client.run("restarted")
        assert (view.liveness, [rank.step for rank in view.ranks]) == ("finished", [STEPS, STEPS])
        for rank in (0, 1):
            told = [row.step for row in client.steps("restarted", rank).steps]
            assert told == [*range(FAILS_AT[-1] + 1, STEPS + 1)], "by the agent that came last"
        assert "is not part of the run" not in done.stderr
        assert "held by" not in done.stderr
    plain, ranks = network(), range(2)
    adam = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(STEPS):
        adam.zero_grad()
        torch.stack([loss_of(plain, step, rank) for rank in ranks]).mean().backward()
        adam.step()
    for name, weight in torch.load(tmp_path / "saved.pt")["model"].items():
        torch.testing.assert_close(weight, plain.state_dict()[name.removeprefix("module.")], rtol=0, atol=1e-6)
