"""Gradients of the framework as the engine needs them: when they are ready, whether they changed since a copy.

Only the thread that runs the backward or `step()` looks at `.grad`; lanes see what it took down (`Arrived`). Autograd
replaces `.grad` without the interpreter's lock, so that another thread that looked could find half a pointer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tidegate.agent.devices.base import Device, Event, GradRef
from tidegate.agent.subgroups import GRAD_DTYPES, Layout, flat, grad_dtype_of
from tidegate.errors import ParameterError


@dataclass(eq=False, slots=True)
class Arrived:
    """A gradient as it was when it was noted. While this lives, its memory is not given to another gradient.

    dense: the same numbers in the order of the weight's storage; mostly the same tensor. ready: when they are there.
    """

    tensor: torch.Tensor
    version: int
    dense: torch.Tensor
    ready: Event

    def is_still(self, grad: torch.Tensor | None) -> bool:
        return grad is self.tensor and grad._version == self.version


Taken = tuple[Arrived | None, ...]
"""What the gradients of a subgroup were when an op read them."""


@dataclass
class _Readiness:
    """How often a parameter's gradient was accumulated this step, and how often it was last step."""

    count: int = 0
    expected: int = 1


class Gradients:
    """Mode `keep`: `.grad` stays. Copies before `step()` are speculative: `taken` tells whether they still hold."""

    def __init__(self, device: Device, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout]) -> None:
        self._device = device
        self._params: list[torch.nn.Parameter] = []
        self._current: list[Arrived | None] = []
        self._readiness: list[_Readiness] = []
        self._subgroups_of: list[list[Layout]] = []
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._fire: Callable[[int], None] | None = None
        self._lock = threading.Lock()
        """Guards readiness: under DDP it changes in the threads of the collectives."""
        self.extend(params, layouts)

    def extend(self, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout]) -> None:
        """More parameters, behind those that are there."""
        self._params += params
        self._current += [None] * len(params)
        self._readiness += [_Readiness() for _ in params]
        self._subgroups_of += [[] for _ in params]
        for layout in layouts:
            for segment in layout.segments:
                self._subgroups_of[segment.param].append(layout)

    # ---- when they arrive

    def watch(self, on_gradient: Callable[[int], None]) -> None:
        """Calls the method `on_gradient(param)` whenever autograd has accumulated into a parameter.

        Its object is held weakly: a model must not keep an optimizer alive that nobody else holds.
        """
        method = weakref.WeakMethod(on_gradient)

        def fire(index: int) -> None:
            alive = method()
            if alive is not None:
                alive(index)

        self._fire = fire
        self.watch_unfrozen()

    def watch_unfrozen(self) -> None:
        """Parameters that were frozen when the optimizer was built are watched once they are not."""
        fire = self._fire
        if fire is None:
            return
        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._hooks:
                hook = param.register_post_accumulate_grad_hook(lambda _, index=index: fire(index))
                self._hooks[index] = hook

    def accumulated(self, param: int) -> tuple[int, ...]:
        """Notes one accumulation; the subgroups whose gradients are all there now, as far as last step tells."""
        self._note(param)
        with self._lock:
            self._readiness[param].count += 1
            return tuple(layout.id for layout in self._subgroups_of[param] if self._is_ready(layout))

    def _is_ready(self, layout: Layout) -> bool:
        return all(self._readiness[s.param].count >= self._readiness[s.param].expected for s in layout.segments)

    def refresh(self) -> None:
        """`step()` begins: what `.grad` is now counts, whoever changed it since it arrived."""
        for param in range(len(self._params)):
            self._note(param)

    def _note(self, param: int) -> None:
        weight, known = self._params[param], self._current[param]
        grad = weight.grad
        if known is not None and known.is_still(grad):
            return
        if grad is None:
            self._current[param] = None
            return
        _check(param, weight, grad)
        dense = _as_stored(weight, grad)
        self._device.adopt(dense)
        self._current[param] = Arrived(grad, grad._version, dense, self._device.now())

    # ---- what lanes see

    def take(self, layout: Layout) -> Taken:
        return tuple(self._current[segment.param] for segment in layout.segments)

    def has(self, param: int) -> bool:
        return self._current[param] is not None

    def arrived(self, param: int) -> Arrived | None:
        return self._current[param]

    def reference(self, param: int) -> GradRef | None:
        known = self._current[param]
        if known is None:
            return None
        dense = flat(known.dense)
        return GradRef(dense.data_ptr(), dense.numel(), GRAD_DTYPES[dense.dtype])

    # ---- a step's end

    def step_done(self) -> None:
        """What was seen this step is expected of the next."""
        for ready in self._readiness:
            ready.expected = max(ready.count, 1)
            ready.count = 0
        self._let_go()

    def forget(self) -> None:
        """Gradients were dropped: the step begins anew."""
        for ready in self._readiness:
            ready.count = 0
        self._let_go()

    def _let_go(self) -> None:
        self._current = [None] * len(self._params)

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._let_go()


def _check(index: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
    if grad.layout != torch.strided:
        raise ParameterError(
            f"Parameter {index} has a {grad.layout} gradient; only dense gradients are supported. "
            "Use sparse=False in nn.Embedding."
        )
    if grad.dtype != grad_dtype_of(weight):
        raise ParameterError(
            f"Parameter {index} has a {grad.dtype} gradient; {grad_dtype_of(weight)} was expected when the optimizer "
            "was built. Set param.grad_dtype before building it."
        )


def _as_stored(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient in the order of the weight's storage; a copy where it has another."""
    if grad.stride() == weight.stride() or (grad.is_contiguous() and weight.is_contiguous()):
        return grad
    copied = torch.empty_like(weight, dtype=grad.dtype, memory_format=torch.preserve_format)
    return copied.copy_(grad.detach())
