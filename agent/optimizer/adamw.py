"""`tidegate.AdamW`: the optimizer with the update rule "adamw", and the arguments of `torch.optim.AdamW`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.knobs.setting_checks import check_flag


class AdamW(Optimizer):
    """AdamW with offloaded state. For given gradients, its weights equal those of the reference implementation in NumPy
    (`tidegate.kernels.arithmetic.oracle`), bit for bit.

    params: as in `torch.optim.AdamW`: of any shape, in fp32, bf16 or fp16, all on one device.
    lr: learning rate, as in `torch.optim.AdamW`: a number, or a scalar tensor of any dtype.
    betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`.
    decoupled: False gives Adam, with weight decay as an L2 term (flag; default True).
    max_grad_norm: clips the norm of all gradients to this limit, above 0; None: no clipping (norm; default None).
    offload: settings of offloading; None for all defaults (`Offload`; default None).
    torch_options: further arguments of `torch.optim.AdamW`. `foreach` and `fused` are accepted and ignored;
        `amsgrad`, `capturable` and `differentiable` are refused unless False.

    Raises ParameterError if there are no parameters, or if one is sparse, shared or unsupported; ConfigError for other
    arguments that cannot work. Call `close()` at the end, or use the optimizer as a context manager.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        offload: Offload | None = None,
        **torch_options: Any,
    ) -> None:
        # `defaults` of another optimizer, given as arguments, has the flag under its name in param groups.
        flag = check_flag("decoupled", torch_options.pop("decoupled_weight_decay", decoupled))
        super().__init__(
            params, "adamw", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=flag,
            maximize=maximize, max_grad_norm=max_grad_norm, offload=offload, **torch_options,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch. As in torch's AdamW, a loaded state of Adam does not make it Adam."""
        super().__setstate__(state)
        if self.defaults["decoupled_weight_decay"]:
            for group in self.param_groups:
                group["decoupled_weight_decay"] = True
