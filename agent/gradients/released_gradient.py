"""The placeholder in `.grad` for a gradient that the engine has taken and released."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tidegate.agent.parameters.shards import shard_of
from tidegate.agent.parameters.subgroups import grad_dtype_of
from tidegate.errors import ParameterError


class ReleasedGradient(torch.Tensor):
    """Placeholder in `.grad` for a gradient that was released. It has shape, dtype and device, but no memory: every
    torch operation on it raises ParameterError."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> ReleasedGradient:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=grad_dtype_of(like), device=like.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _use_refused(func)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute, but raises ParameterError for `data`: torch handles `.data = …` without
        `__torch_dispatch__`, so the placeholder would silently get memory that nothing reads."""
        if name == "data":
            raise _use_refused(".data = …")
        super().__setattr__(name, value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _use_refused(what: object) -> ParameterError:
    """Returns the error for a use of the placeholder. what: the operation that was tried."""
    return ParameterError(
        f"{what} is not possible on a gradient that was released at its arrival (gradients='release'). Clip with "
        "max_grad_norm instead of clip_grad_norm_, put all but the last backward of a step into "
        "`with optimizer.accumulate():`, drop gradients with optimizer.zero_grad(). "
        "DistributedDataParallel (DDP) and GradScaler need gradients='keep'."
    )


def is_released(grad: torch.Tensor | None) -> bool:
    """Whether `.grad` holds the placeholder of a released gradient."""
    return grad is not None and isinstance(shard_of(grad), ReleasedGradient)
