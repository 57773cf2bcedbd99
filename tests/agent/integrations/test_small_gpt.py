"""A script as nanoGPT's: its own groups, schedule, accumulation, clipping and checkpoint, resumed by a new process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.agent.integrations.small_gpt import offloaded, train
from tests.agent.integrations.test_accelerate import run_ranks
from tests.services import ROOT


@pytest.mark.slow
def test_a_gpt_that_is_resumed_trains_as_with_torchs_adamw(tmp_path: Path) -> None:
    """The second half is another process's; what comes after it is torch's optimizer, from the state that ours left."""
    for folder in ("ours", "theirs"):
        (tmp_path / folder).mkdir()
    train(offloaded, tmp_path / "ours", 7)
    command = [sys.executable, "-m", "tests.agent.integrations.small_gpt", str(tmp_path / "ours"), "14"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ours = torch.load(tmp_path / "ours" / "ckpt.pt")
    theirs = train(torch.optim.AdamW, tmp_path / "theirs", 14)
    assert_alike(ours, theirs)
    assert ours["losses"][-1] < 0.8 * ours["losses"][0], "it learns"
    back, on = (train(torch.optim.AdamW, tmp_path / folder, 20) for folder in ("ours", "theirs"))
    assert_alike(back, on)


@pytest.mark.slow
def test_a_compiled_gpt_trains_and_resumes_as_with_torchs_adamw(tmp_path: Path) -> None:
    """As nanoGPT's `--compile`, but for the code that is made: what is traced is run by torch's own kernels."""
    made = {}
    for name, build in (("ours", offloaded), ("theirs", torch.optim.AdamW)):
        (tmp_path / name).mkdir()
        for last in (4, 8):
            made[name] = train(build, tmp_path / name, last, lambda model: torch.compile(model, backend="aot_eager"))
    assert_alike(made["ours"], made["theirs"])


@pytest.mark.slow
def test_a_gpt_on_two_ranks_trains_and_resumes_as_with_torchs_adamw(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, "small_gpt_ranks") == {"ddp-0", "ddp-1"}


def assert_alike(mine: dict, theirs: dict) -> None:  # type: ignore[type-arg]
    assert mine["iter_num"] == theirs["iter_num"]
    torch.testing.assert_close(torch.tensor(mine["losses"]), torch.tensor(theirs["losses"]), rtol=0, atol=1e-5)
    assert mine["model"].keys() == theirs["model"].keys()
    for name, weight in mine["model"].items():
        torch.testing.assert_close(weight, theirs["model"][name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
