"""Verdicts say why gradients were not copied beside the backward: clipped in place, or handed over all at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST
from tests.services import until
from tidegate.plan.ops import D2H

KEEPING = tidegate.Offload(stride="off", subgroup_numel=400, emulated=FAST, cpu_threads=1)
WIDTH = 20


def blocks() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def trained(
    model: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], after: Callable[[Any], object] = lambda _: None
) -> tuple[str, Any]:
    """The verdict on the third step, and all that was recorded. Early copies are awaited before `after`."""
    with (
        tidegate.AdamW(model.parameters(), offload=KEEPING) as optimizer,
        tidegate.attach(optimizer, model, run="hints") as attachment,
    ):
        executor = optimizer.engine._executor
        for _ in range(3):
            optimizer.zero_grad()
            run(torch.ones(3, WIDTH)).square().mean().backward()
            until(lambda: len(executor.done_early()) == len(optimizer.engine.layouts), "early copies")
            executor.wait_until_ready_ops_issued((D2H,))  # a copy that has only begun may read what `after` writes
            after(model)
            optimizer.step()
        report = attachment.recorder.totals.last
        assert report is not None
        return report.verdict, attachment.recorder.totals


@pytest.mark.parametrize(
    ("after", "again"),
    [
        (lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9), True),
        (lambda model: torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.1), False),
        (lambda model: None, False),
    ],
)
def test_gradients_that_are_clipped_in_place_are_told(after: Callable[[Any], object], again: bool) -> None:
    model = blocks()
    said, totals = trained(model, model, after)
    assert ("100% of the gradients were copied again" in said) == again
    assert ("max_grad_norm" in said) == again
    assert totals.gradient_arrival.recopied == 1.0 if again else totals.gradient_arrival.recopied < 0.5


def take_a_while() -> None:
    for _ in range(2):
        torch.zeros(1500, 1500) @ torch.zeros(1500, 1500)


class Whole(torch.autograd.Function):
    """All of the model in one node of the graph, which hands over its gradients together: as torch.compile makes it."""

    @staticmethod
    def forward(ctx: Any, model: torch.nn.Module, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.out, ctx.params = model(x), params
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        take_a_while()
        return (None, None, *torch.autograd.grad(ctx.out, ctx.params, grads[0]))


class Compiled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Whole.apply(self.inner, x, *self.inner.parameters())
        return out


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("attached", ["what is compiled", "what torch.compile returns", "a module around it"])
def test_a_model_that_is_compiled_as_a_whole_is_told(attached: str, backend: str) -> None:
    inner = blocks()
    whole: torch.nn.Module = torch.compile(inner, backend=backend)
    model = {"what is compiled": inner, "a module around it": torch.nn.Sequential(whole, torch.nn.Softplus())}.get(
        attached, whole
    )
    said, totals = trained(model, whole if model is inner else model)
    assert "100% of the gradients came together" in said
    assert "compile its blocks instead" in said
    assert totals.gradient_arrival.single_node_share == 1.0


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_is_compiled_block_by_block_is_not(backend: str) -> None:
    model = torch.nn.Sequential(*(blocks() for _ in range(3)))
    for block in model:
        block.compile(backend=backend)
    said, totals = trained(model, model)
    assert "came together" not in said
    assert totals.gradient_arrival.single_node_share < 0.75


def test_one_node_that_hands_over_all_gradients_is_told() -> None:
    model = Compiled()
    said, totals = trained(model, model)
    assert "compile its blocks instead" in said
    assert totals.gradient_arrival.single_node_share == 1.0
    assert totals.gradient_arrival.first_gradient > 0.75


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        take_a_while()
        return grad


class Slow(torch.nn.Module):
    """A layer whose backward takes longer than all others'."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Pause.apply(x)
        return out


def test_an_ordinary_backward_is_not() -> None:
    model = torch.nn.Sequential(blocks(), Slow(), blocks())
    said, totals = trained(model, model)
    assert "compile" not in said
    assert 0 < totals.gradient_arrival.first_gradient < 0.75
    assert totals.gradient_arrival.single_node_share == 0.0
