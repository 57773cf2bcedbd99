"""A gradient as it was noted, and what tells that it is another now."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.agent.devices.base import Event
from tidegate.agent.parameters.subgroups import grad_dtype_of
from tidegate.errors import ParameterError

Form = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]]
"""Of a gradient: address, version, dtype, shape and strides. Only a write through `.data` or numpy leaves it."""


@dataclass(eq=False, slots=True)
class Arrived:
    """A gradient as it was when it was noted. While this lives, its memory is not given to another gradient.

    form: where `tensor` lay and how, None where it may have changed unnoticed. dense: the same numbers in the order of
    the weight's storage, mostly in the same memory: an alias, as `tensor` gets other memory by `.data = …` or `set_`.
    ready: when they are there. sample: some of its bits, where copies of it are speculative.
    """

    tensor: torch.Tensor
    form: Form | None
    dense: torch.Tensor
    ready: Event
    view: torch.Tensor | None = None
    sample: torch.Tensor | None = None

    def is_still(self, grad: torch.Tensor) -> bool:
        """Whether nobody has changed it, as far as torch knows, or given it other memory."""
        return grad is self.tensor and self.form is not None and self.form == form_of(grad)


def form_of(grad: torch.Tensor) -> Form:
    """Cheap: it is asked of each gradient at each step."""
    version = 0 if grad.is_inference() else grad._version
    return grad.data_ptr(), version, grad.dtype, grad.shape, grad.stride()


def check_gradient(index: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
    """ParameterError when `grad` is no gradient of `weight`, whose number is `index`."""
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
    if grad.shape != weight.shape:  # torch itself refuses one on another device
        raise ParameterError(
            f"Parameter {index} has a gradient of shape {tuple(grad.shape)}, and its weight has {tuple(weight.shape)}. "
            "Give .grad the shape of the weight."
        )
    if not grad.data_ptr() and grad.numel():
        raise ParameterError(
            f"The memory of the gradient of parameter {index} was freed (its storage was resized). Resize it back "
            "before step(), or drop the gradient with optimizer.zero_grad()."
        )


def as_stored(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient in the order of the weight's storage; a copy where it has another."""
    if grad.stride() == weight.stride() or (grad.is_contiguous() and weight.is_contiguous()):
        return grad
    copied = torch.empty_like(weight, dtype=grad.dtype, memory_format=torch.preserve_format)
    return copied.copy_(grad.detach())


def own_alias(dense: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """`dense`, as an object that nobody else can give other memory."""
    return dense.detach() if dense is grad else dense
