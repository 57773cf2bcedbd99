"""Checkpoints of the version before are read: `version2/` was written by it (manifest 2, state file 1)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import tidegate
from tests.agent.plain_adamw import PlainAdamW

VERSION_2 = Path(__file__).parent / "version2"


def grads(step: int, params: list[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    made = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=made).bfloat16() for p in params]


@pytest.mark.parametrize("rule", ["adamw", "deepspeed_adamw"])
def test_training_goes_on_from_a_checkpoint_of_the_version_before(tmp_path: Path, rule: str) -> None:
    folder = shutil.copytree(VERSION_2, tmp_path / "saved")
    (checkpoint,) = tidegate.find_checkpoints(folder)
    assert json.loads((folder / "step-2" / "rank0.json").read_text())["checkpoint"]["version"] == 2
    assert tidegate.find_damaged_checkpoints(folder) == []
    weights = torch.load(checkpoint.folder / "weights.pt")
    params = [torch.nn.Parameter(weight) for weight in weights]
    with tidegate.Optimizer(params, rule, lr=0.1, offload=tidegate.Offload(cpu_threads=1)) as optimizer:
        optimizer.load_checkpoint(folder)
        assert (optimizer.num_steps, optimizer.steps) == (2, (2, 2))
        state = optimizer.state_dict()["state"]
        plain = PlainAdamW([dict(group) for group in optimizer.param_groups])
        for mine, saved in zip(plain.params, state.values(), strict=True):
            mine.exp_avg[:], mine.exp_avg_sq[:] = saved["exp_avg"].flatten(), saved["exp_avg_sq"].flatten()
            mine.aux, mine.step = saved["remainder"].flatten().numpy(), 2
        assert all(saved["exp_avg"].abs().min() > 0 for saved in state.values())
        given = grads(2, params)
        for param, grad in zip(params, given, strict=True):
            param.grad = grad
        optimizer.step()
        if rule == "adamw":
            plain.step(list(given))
            assert plain.same_weights(params)
            assert [p.detach().view(torch.int16).sum().item() for p in params] == [-12327, 77097], "as it went on then"
        optimizer.save_checkpoint(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "step-3" / "rank0.json").read_text())["checkpoint"]
    assert (again["version"], again["rule"]) == (3, "adamw")
    assert [tensor["name"] for tensor in again["tensors"]] == ["exp_avg", "exp_avg_sq"]
