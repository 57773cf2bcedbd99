"""A training step under `torch.compile`: the engine is left out of what is compiled, without a word, and is exact."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

TRAINING = """
import sys, warnings
warnings.simplefilter("error")
import torch
import tidegate

def train(make, compiled):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = make(model.parameters())

    def update():
        optimizer.step()

    update = torch.compile(update, backend="eager") if compiled == "update" else update

    def step(batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        update()

    step = torch.compile(step, backend="eager") if compiled == "step" else step
    for _ in range(4):
        step(torch.randn(4, 8))
    return [param.detach().clone() for param in model.parameters()]

compiled = sys.argv[1]
plain = train(lambda params: tidegate.AdamW(params, lr=1e-3), None)
for one, other in zip(plain, train(lambda params: tidegate.AdamW(params, lr=1e-3), compiled)):
    assert torch.equal(one, other)
"""


@pytest.mark.parametrize("compiled", ["update", "step"])
def test_a_compiled_step_says_nothing_and_gives_the_same_weights(compiled: str) -> None:
    ended = subprocess.run([sys.executable, "-c", TRAINING, compiled], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Dynamo" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
