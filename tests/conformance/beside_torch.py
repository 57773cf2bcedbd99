"""The same model twice: trained by torch's AdamW or Adam, and by ours with the settings that torch's tests meet."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

import tidegate
from tests.conformance.substitutes import OFFLOAD
from tidegate.agent.gradients.gradients import Mode

SHAPES = ((40, 50), (700,), (7, 3, 5), (), (2500,))
"""More than one subgroup, and subgroups that are resident, updated on the device and by the CPU."""


class BesideTorch:
    """`later`: options of a second param group, which gets every second parameter."""

    def __init__(
        self, name: str, later: dict[str, Any] | None = None, *, gradients: Mode = "keep", **options: Any
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.theirs = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.ours = [torch.nn.Parameter(param.detach().clone()) for param in self.theirs]
        self.reference = getattr(torch.optim, name)(_groups(self.theirs, later), foreach=False, **options)
        adam: dict[str, Any] = {} if name == "AdamW" else {"decoupled": False, "weight_decay": 0.0}
        settings = {"offload": replace(OFFLOAD, gradients=gradients), **adam, **options}
        self._build = lambda: tidegate.AdamW(_groups(self.ours, later), **settings)
        self.optimizer = self._build()
        self.steps = 0

    def restart(self) -> None:
        """Another optimizer of ours, as new, for the weights as they are."""
        self.optimizer.close()
        self.optimizer = self._build()

    def step(self) -> None:
        """A backward, in which some parameters get no gradient, and an update of both."""
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        for params, optimizer in ((self.theirs, self.reference), (self.ours, self.optimizer)):
            optimizer.zero_grad()
            terms = [(param * gradient).sum() for param, gradient in zip(params, gradients, strict=True)]
            del terms[self.steps % 3]
            torch.stack(terms).sum().backward()
            optimizer.step()

    def check(self) -> None:
        """Equal but for what rounding does when the same operations come in another order."""
        ours, theirs = self.optimizer.state_dict(), self.reference.state_dict()
        assert ours["state"].keys() == theirs["state"].keys()
        for index, expected in theirs["state"].items():
            assert ours["state"][index].keys() == expected.keys()
            for name, values in expected.items():
                self._same(ours["state"][index][name], values, f"{name} of parameter {index}")
        for index, (param, expected) in enumerate(zip(self.ours, self.theirs, strict=True)):
            self._same(param.detach(), expected.detach(), f"parameter {index}")

    def _same(self, ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            ours, theirs, rtol=2e-6, atol=1e-7, msg=lambda text: f"{what} after {self.steps} steps: {text}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.optimizer.close()


def _groups(params: list[torch.nn.Parameter], later: dict[str, Any] | None) -> list[Any]:
    if later is None:
        return list(params)
    return [{"params": params[::2]}, {"params": params[1::2], **later}]
