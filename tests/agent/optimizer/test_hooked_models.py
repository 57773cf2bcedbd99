"""Models that the engine has hooks on can still be copied and saved whole, and keep no optimizer alive."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.optimizer.test_forward_overlap import overlapped, tokens


@pytest.fixture(params=["attached", "overlapped", "both"])
def hooked(request: pytest.FixtureRequest) -> Any:
    model, optimizer = overlapped()
    with optimizer:
        if request.param != "overlapped":
            tidegate.attach(optimizer, model, run="hooked")
        if request.param != "attached":
            tidegate.overlap_forward(optimizer, model)
        train(model, optimizer, 0)
        tidegate.wait(optimizer)
        yield model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(tokens(seed)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_copy_is_a_model_of_its_own(hooked: Any, way: str) -> None:
    model, optimizer = hooked
    if way == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    before = copied(tokens(1))
    train(model, optimizer, 1)
    phase = optimizer.phases.current
    # Whatever the optimizer does meanwhile, the copy neither waits for it nor is it told of it.
    torch.testing.assert_close(copied(tokens(1)), before, rtol=0, atol=0)
    copied.state_dict()
    assert optimizer.phases.current == phase


def test_a_model_keeps_no_optimizer_alive() -> None:
    model, optimizer = overlapped()
    tidegate.attach(optimizer, model, run="kept").close()
    tidegate.overlap_forward(optimizer, model)
    train(model, optimizer, 0)
    tidegate.wait(optimizer)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    model(tokens(1)).square().mean().backward()
