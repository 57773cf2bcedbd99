"""Records each gradient when it arrives, detects later changes of it, and checks that it fits its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from tidegate.agent.devices.base import Event
from tidegate.agent.parameters.subgroups import grad_dtype_of
from tidegate.errors import ParameterError

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""Function that returns the number of owners of the storage at a `cdata` address. Older builds of torch without CUDA do
not have it, and do not need it: the emulated device keeps each gradient until it has read it."""

TensorIdentity = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]]
"""Address, version, dtype, shape and strides of a gradient. Each change of the gradient changes this, except for writes
through `.data` or NumPy."""


@dataclass(eq=False, slots=True)
class GradientRecord:
    """A gradient as it was when it was recorded. While this object exists, the memory of the gradient is not reused.

    tensor: the gradient.
    identity: address, version, dtype, shape and strides of `tensor` (`TensorIdentity`); None if changes of `tensor`
        cannot be detected.
    dense: the same numbers in the order of the weight's storage, usually in the same memory. This is another tensor
        object, because `tensor` can get other memory by `.data = …` or `set_`.
    ready: the event after which the numbers are valid.
    view, sample: the sampled elements in the gradient's memory, and a copy of their bits. None unless the gradient may
        be copied to the host before `step()` and change afterwards.
    """

    tensor: torch.Tensor
    identity: TensorIdentity | None
    dense: torch.Tensor
    ready: Event
    view: torch.Tensor | None = None
    sample: torch.Tensor | None = None

    def is_unchanged(self, grad: torch.Tensor) -> bool:
        """Whether `grad` is the recorded tensor, and its address, version, dtype, shape and strides are unchanged."""
        return grad is self.tensor and self.identity is not None and self.identity == identity_of(grad)


def identity_of(grad: torch.Tensor) -> TensorIdentity:
    """Returns address, version, dtype, shape and strides of a gradient, by which changes of it are detected. Called for
    every gradient in every step, so it must be cheap."""
    version = 0 if grad.is_inference() else grad._version
    return grad.data_ptr(), version, grad.dtype, grad.shape, grad.stride()


def check_gradient(index: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
    """Raises ParameterError if `grad` cannot be a gradient of `weight`, the parameter with number `index`."""
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
    if grad.shape != weight.shape:  # torch itself refuses a gradient on another device
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
    """Returns the gradient with its elements in the order of the weight's storage: `grad` itself if it has this order,
    else a copy."""
    if grad.stride() == weight.stride() or (grad.is_contiguous() and weight.is_contiguous()):
        return grad
    copied = torch.empty_like(weight, dtype=grad.dtype, memory_format=torch.preserve_format)
    return copied.copy_(grad.detach())


def private_alias(dense: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns `dense` as a tensor object other than `grad`: an alias in the same memory if `dense` is `grad` itself. So
    the result stays valid when other code gives other memory to `grad`."""
    return dense.detach() if dense is grad else dense


def has_other_owner(grad: torch.Tensor) -> bool:
    """Whether the memory of a gradient that has just arrived has an owner besides `.grad`: usually another gradient of
    the same backward. Autograd may add to that one in place as soon as `.grad` no longer owns the memory. To be called
    in the hook of the gradient. False if torch cannot tell."""
    return _use_count is not None and _num_owners(grad, _use_count) > _num_owners_of_new_gradient(_use_count)


def _num_owners(grad: torch.Tensor, use_count: Callable[[int], int]) -> int:
    """Number of owners of the memory of a gradient."""
    return use_count(grad.untyped_storage()._cdata)


@cache
def _num_owners_of_new_gradient(use_count: Callable[[int], int]) -> int:
    """Number of owners of a gradient's memory, seen in the hook of the gradient, if only `.grad` and the node that
    writes it own the memory. It depends on the version of torch."""
    found: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.nn.Parameter(torch.zeros(2, device="cpu"))
        weight.register_post_accumulate_grad_hook(lambda param: found.append(_num_owners(param.grad, use_count)))
        (weight * 2.0).sum().backward()
    return found[0]
