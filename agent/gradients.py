"""Gradients of the framework as the engine needs them: when they are ready, whether they changed since a copy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tidegate.agent.devices.base import Device, GradRef
from tidegate.agent.subgroups import FORMATS, Layout, flat
from tidegate.errors import ParameterError

Stamp = tuple[tuple[torch.Tensor | None, int], ...]
"""Each gradient of a subgroup with its version. The tensors are held: their memory cannot be given to another gradient
while a stamp, or a copy that it was made for, lives."""


def same(one: Stamp | None, other: Stamp) -> bool:
    """Whether both are the same tensors at the same versions."""
    return one is not None and all(a is b and m == n for (a, m), (b, n) in zip(one, other, strict=True))


@dataclass
class _Readiness:
    """How often a parameter's gradient was accumulated this step, and how often it was last step."""

    count: int = 0
    expected: int = 1


class Gradients:
    """Mode `keep`: `.grad` stays. Copies before `step()` are speculative, `stamp` tells whether they still hold."""

    def __init__(self, device: Device, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout]) -> None:
        self._device = device
        self._params = params
        self._readiness = [_Readiness() for _ in params]
        self._subgroups_of: list[list[Layout]] = [[] for _ in params]
        for layout in layouts:
            for segment in layout.segments:
                self._subgroups_of[segment.param].append(layout)
        self._dense: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """Gradients in another order than their weight: tensor and version, and the copy in the weight's order."""
        self._lock = threading.Lock()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, on_gradient: Callable[[int], None]) -> None:
        """Calls the method `on_gradient(param)` whenever autograd has accumulated into a parameter.

        Its object is held weakly: a model must not keep an optimizer alive that nobody else holds.
        """
        method = weakref.WeakMethod(on_gradient)

        def fire(index: int) -> None:
            alive = method()
            if alive is not None:
                alive(index)

        for index, param in enumerate(self._params):
            if param.requires_grad:
                self._hooks.append(param.register_post_accumulate_grad_hook(lambda _, index=index: fire(index)))

    def accumulated(self, param: int) -> tuple[int, ...]:
        """Notes one accumulation; the subgroups whose gradients are all there now, as far as last step tells."""
        self.flat(param)
        self._readiness[param].count += 1
        return tuple(layout.id for layout in self._subgroups_of[param] if self._is_ready(layout))

    def _is_ready(self, layout: Layout) -> bool:
        return all(self._readiness[s.param].count >= self._readiness[s.param].expected for s in layout.segments)

    def step_done(self) -> None:
        """What was seen this step is expected of the next."""
        for ready in self._readiness:
            ready.expected = max(ready.count, 1)
            ready.count = 0
        self._dense.clear()

    def has(self, param: int) -> bool:
        return self._params[param].grad is not None

    def stamp(self, layout: Layout) -> Stamp:
        return tuple(self._stamp(segment.param) for segment in layout.segments)

    def _stamp(self, param: int) -> tuple[torch.Tensor | None, int]:
        grad = self._params[param].grad
        return grad, 0 if grad is None else grad._version

    def flat(self, param: int) -> torch.Tensor | None:
        """The gradient in the order of the parameter's storage, as device memory; None when there is none."""
        weight, grad = self._params[param], self._params[param].grad
        if grad is None:
            return None
        if grad.layout != torch.strided:
            raise ParameterError(
                f"Parameter {param} has a {grad.layout} gradient; only dense gradients are supported. "
                "Use sparse=False in nn.Embedding."
            )
        if grad.dtype != weight.dtype:
            raise ParameterError(
                f"Parameter {param} is {weight.dtype} but its gradient is {grad.dtype}; they must match."
            )
        # Several lanes may ask at once; one copy in storage order must serve them all.
        with self._lock:
            dense = self._as_stored(param, weight, grad)
            self._device.adopt(("grad", param), dense)
        return flat(dense)

    def _as_stored(self, param: int, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if grad.stride() == weight.stride() or (grad.is_contiguous() and weight.is_contiguous()):
            return grad
        known = self._dense.get(param)
        if known is None or known[0] is not grad or known[1] != grad._version:
            copied = torch.empty_like(weight, memory_format=torch.preserve_format)
            known = (grad, grad._version, copied.copy_(grad.detach()))
            self._dense[param] = known
        return known[2]

    def reference(self, param: int) -> GradRef | None:
        dense = self.flat(param)
        if dense is None:
            return None
        return GradRef(dense.data_ptr(), dense.numel(), FORMATS[dense.dtype].grad)

    def forget(self) -> None:
        """Gradients were dropped: the step begins anew."""
        for ready in self._readiness:
            ready.count = 0
        self._dense.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
