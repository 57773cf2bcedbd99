"""Overlap of the update with the next forward: a module waits for its own weights, not for the whole update.

The overlap is off unless `overlap_forward` is called. A unit of the model (a block, an embedding, a head) waits for all
weights in it; a module that contains units waits only for its direct weights. One forward is observed to find the
weights that are read outside of their unit: the whole model waits for these. Evaluation, `state_dict` and
`load_state_dict` of model and optimizer wait for the whole update, and so do the first gradient of the next backward
and the next `step()`. Other code that reads or writes weights, such as an average of weights, must call
`tidegate.wait()` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from tidegate.agent.optimizer.module_hooks import ModelHook
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.optimizer.wrapped import OptimizerWrapper, unwrapped
from tidegate.errors import ConfigError

CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


class ForwardOverlap:
    """Handle that keeps the overlap of updates with the forward of a model switched on. Made by `overlap_forward`;
    ended by `close()`, a `with` block or `optimizer.close()`."""

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module) -> None:
        optimizer._follow_params()
        self._optimizer = optimizer
        self._model = model
        self._numbers: dict[int, int] = {}
        self._units: dict[torch.nn.Module, frozenset[int]] = {}
        self._read_early: set[int] = set()
        """Numbers of the weights for which the whole model waits: those that are read before the unit that holds them
        is called, and those whose unit is never called."""
        self._training = False
        """Whether a forward of the model is running that is followed by a backward."""
        self._learner: _ReadsBeforeCall | None = None
        self._handles: list[Any] = []
        self.rebuild()
        optimizer._begin_overlap(self)

    def rebuild(self) -> None:
        """Restarts the overlap for changed parameters of the optimizer: `step()` waits for the whole update again until
        one forward was observed. The optimizer calls this method when its parameters have changed."""
        for handle in self._handles:
            handle.remove()
        self.in_background = False
        self._numbers = {id(p): i for i, p in enumerate(_params(self._optimizer))}
        self._units = {module: self._numbers_of(params) for module, params in units(self._model)}
        self._read_early.clear()
        self._handles = list(self._hook())

    def close(self) -> None:
        """Removes the hooks, so that `step()` waits for the whole update again. Idempotent."""
        self._optimizer._end_overlap(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _numbers_of(self, params: Iterable[torch.nn.Parameter]) -> frozenset[int]:
        return frozenset(self._numbers[id(p)] for p in params if id(p) in self._numbers)

    def _hook(self) -> Iterator[Any]:
        yield self._model.register_forward_pre_hook(ModelHook(self._before_model))
        yield self._model.register_forward_hook(ModelHook(self._finish_learning))
        yield self._model.register_forward_hook(ModelHook(self._stop_learning), always_call=True)
        for module, numbers in self._units.items():
            if numbers:
                yield module.register_forward_pre_hook(ModelHook(self._before_unit, numbers))
        for module in self._model.modules():
            yield module.register_state_dict_pre_hook(ModelHook(self._wait_for_all))
            yield module.register_load_state_dict_pre_hook(ModelHook(self._wait_for_all))

    def _before_unit(self, numbers: frozenset[int], module: torch.nn.Module, *_: Any) -> None:
        if self._learner is not None:
            self._learner.called |= numbers
        # Reentrant checkpoints call modules of a training forward without gradients.
        if module.training and (self._training or torch.is_grad_enabled()):
            self._optimizer._wait_for_weights(numbers)
        else:
            self._optimizer.wait()

    def _before_model(self, model: torch.nn.Module, *_: Any) -> None:
        self._stop_learning()  # an aborted forward may have left a learner
        self._training = torch.is_grad_enabled() and model.training
        if not self._training:
            self._optimizer.wait()
        elif self.in_background:
            self._optimizer._wait_for_weights(self._read_early)
        else:
            self._learner = _ReadsBeforeCall(self._numbers)
            self._learner.__enter__()  # type: ignore[no-untyped-call]

    def _finish_learning(self, *_: Any) -> None:
        """Stores for which weights the whole model must wait, as the observed forward has shown: those that were read
        before the unit that holds them was called, and those whose unit was not called. Then switches the overlap on.
        Runs only if the forward was completed."""
        if self._learner is not None:
            self._read_early |= self._learner.read_early | (set(self._numbers.values()) - self._learner.called)
            self.in_background = True

    def _stop_learning(self, *_: Any) -> None:
        self._training = False
        learner, self._learner = self._learner, None
        if learner is not None:
            learner.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _wait_for_all(self, *_: Any, **__: Any) -> None:
        self._optimizer.wait()


class _ReadsBeforeCall(TorchFunctionMode):
    """Finds the weights that are read before the unit that holds them is called, by intercepting all torch
    functions."""

    def __init__(self, numbers: dict[int, int]) -> None:
        super().__init__()
        self._numbers = numbers
        self.called: set[int] = set()
        self.read_early: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                number = self._numbers.get(id(tensor))
                if number is not None and number not in self.called:
                    self.read_early.add(number)
        return func(*args, **(kwargs or {}))


def units(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Parameter]]]:
    """The modules that wait, each with the weights that it waits for: a unit for all weights in it, a module that
    contains units only for its direct weights.

    A module with a container (ModuleList, ModuleDict, Sequential) anywhere in it is not a unit. Each direct child of a
    container is a unit, whatever it contains.
    """
    if isinstance(model, CONTAINERS) or any(isinstance(m, CONTAINERS) for m in model.modules()):
        yield model, list(model.parameters(recurse=False))
        for child in model.children():
            if isinstance(model, CONTAINERS):
                yield child, list(child.parameters())
            else:
                yield from units(child)
    else:
        yield model, list(model.parameters())


def overlap_forward(optimizer: torch.optim.Optimizer | OptimizerWrapper, model: torch.nn.Module) -> ForwardOverlap:
    """Overlaps the update with the next forward. After one training forward, `step()` returns as soon as the gradient
    norm is known, while the update goes on; the next forward waits for each weight where the weight is read. Results
    are the same as without overlap, bit for bit. Only the update's last copies overlap in the paper (Deep Optimizer
    States, Figure 5); here all of its work may. `close()` of the returned handle, or `optimizer.close()`, ends the
    overlap.

    optimizer: a `tidegate.AdamW` with `Offload(gradients="release")`, or a wrapper of a framework that holds one.
        Released gradients are needed because nothing else may write to gradients that an update still reads.
    model: the module that holds all parameters of the optimizer. Methods other than its `forward` that read weights
        during training must call `tidegate.wait()` first.

    Raises ConfigError, with nothing changed, for another optimizer, for one that overlaps a forward already, for
    parameters that are not in the model, and for models in which reads of weights cannot be intercepted
    (`torch.compile`, FSDP2, other DTensors).
    """
    inner = unwrapped(optimizer, "overlap_forward")
    _require_module(model)
    _require_gated_reads(inner, model)
    return ForwardOverlap(inner, model)


def wait(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> None:
    """Waits for the end of the last update; to be called before weights are read or written outside a training
    forward.

    optimizer: a `tidegate.AdamW`, or a wrapper of a framework that holds one. Raises ConfigError for any
        other optimizer.
    """
    unwrapped(optimizer, "wait").wait()


def _require_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"overlap_forward takes the model, a torch.nn.Module, and not a {type(model).__name__}.")


def _require_gated_reads(optimizer: Optimizer, model: torch.nn.Module) -> None:
    """Raises ConfigError unless the forward of the model can wait for the update of each weight before it reads the
    weight."""
    if optimizer.overlap is not None:
        raise ConfigError(
            "overlap_forward was called for this optimizer before: first call close() on the object that it returned."
        )
    if optimizer.offload.gradients != "release":
        raise ConfigError(
            'Overlap with the forward needs Offload(gradients="release"): '
            "gradients that are kept could be written while the update still reads them."
        )
    inside = {id(param) for param in model.parameters()}
    if any(id(param) not in inside for param in _params(optimizer)):
        raise ConfigError(
            "The optimizer has parameters that are not in this model: no module would wait for them. Give the module "
            "that holds all of them."
        )
    if isinstance(model, torch._dynamo.OptimizedModule) or any(m._compiled_call_impl for m in model.modules()):
        raise ConfigError(
            "overlap_forward does not work with torch.compile: compiled code reads weights without waiting for their "
            "update. Use only one of the two."
        )
    _require_plain(list(model.parameters()))


def _params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _require_plain(params: Sequence[torch.Tensor]) -> None:
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if any(isinstance(param, DTensor) for param in params):
            raise ConfigError(
                "overlap_forward does not work with DTensor parameters (FSDP2): FSDP2 reads weights without waiting "
                "for their update. Leave out overlap_forward."
            )
