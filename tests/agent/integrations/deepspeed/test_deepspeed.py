"""DeepSpeed ZeRO-3 for real, on its CPU accelerator: its own offload beside ours, killed and resumed, at both ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.live import threaded
from tests.services import free_port

ROOT = Path(__file__).parents[4]


pytest.importorskip("deepspeed")
pytestmark = pytest.mark.timeout(1300)
"""DeepSpeed compiles cpu_adam when it is first used, some minutes; `make` has it do that before the tests."""


def run_ranks(count: int, folder: Path, what: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        *[sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"],
        *["-m", "tests.agent.integrations.deepspeed.ranks", str(folder), what],
    ]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip


def test_a_few_updates_are_deepspeeds(tmp_path: Path) -> None:
    done = run_ranks(1, tmp_path, "few")
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((tmp_path / "worst-0.json").read_text()) == {"static 0.25": 0.0, "two paths": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_each_update_is_deepspeeds_and_a_killed_run_goes_on_as_if_it_was_not(tmp_path: Path, count: int) -> None:
    with threaded(tmp_path / "daemon") as daemon:
        tokens = {"TIDEGATE_AGENT_TOKEN": daemon.tokens["agent"], "TIDEGATE_OPERATE": daemon.tokens["operate"]}
        first = run_ranks(count, tmp_path, "train", TIDEGATE_URL=daemon.url, **tokens)
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(count)), first.stderr[-4000:]
    for rank in range(count):
        worst = json.loads((tmp_path / f"worst-{rank}.json").read_text())
        assert len(worst) == (4 if count == 1 else 11)
        assert set(worst.values()) == {0.0}, worst
    second = run_ranks(count, tmp_path, "resume")
    assert all((tmp_path / f"resumed-{rank}").exists() for rank in range(count)), second.stderr[-4000:]
    if count > 1:
        third = run_ranks(1, tmp_path, "universal")
        assert (tmp_path / "universal-0").exists(), third.stderr[-4000:]


@pytest.mark.slow
def test_the_trainer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.agent.integrations.deepspeed.trainer", str(tmp_path)], cwd=ROOT,
        env={**os.environ, **place, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
