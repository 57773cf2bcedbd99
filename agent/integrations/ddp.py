"""Integration with DistributedDataParallel (DDP): copies gradients as soon as DDP has reduced their bucket.

Post-accumulate hooks run before DDP's all-reduce: an early copy would contain only this rank's gradient.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tidegate.agent.engine.engine import Engine
from tidegate.agent.optimizer.adamw import AdamW
from tidegate.errors import ConfigError


class _BucketReceiver:
    """Optimizer whose engine is notified of reduced buckets. The optimizer is held weakly; a closed one is not
    notified."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._numbers: dict[int, int] = {}
        self._numbered_by: Engine | None = None
        """Engine for which `_numbers` is valid: another engine may number parameters differently, after param groups
        changed."""
        self._announced = -1

    @property
    def engine(self) -> Engine | None:
        """The optimizer's engine; None when the optimizer is closed or garbage-collected."""
        optimizer = self.optimizer()
        return optimizer.engine if optimizer is not None and optimizer.engine.usable else None

    def begin(self, engine: Engine) -> None:
        """Prepares the engine before a bucket is reduced."""
        if engine is not self._numbered_by or len(engine.params) != len(self._numbers):
            self._numbers, self._numbered_by = {id(p): i for i, p in enumerate(engine.params)}, engine
        engine.start()
        self._note_end_of_backward(engine)

    def own_gradients(self, bucket: dist.GradBucket) -> list[tuple[int, torch.Tensor]]:  # type: ignore[name-defined]
        """The optimizer's parameters in this bucket: their numbers, with their gradients."""
        numbers = [self._numbers.get(id(param)) for param in bucket.parameters()]
        return [(i, grad) for i, grad in zip(numbers, bucket.gradients(), strict=True) if i is not None]

    def _note_end_of_backward(self, engine: Engine) -> None:
        """Notifies the engine when DDP has written `.grad`. DDP does so in a callback at the end of the backward, which
        it queues after ours; so our callback queues another one."""
        task = torch._C._current_graph_task_id()
        if task != self._announced:
            self._announced = task
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(engine.gradients.reduced_are_written))


class _BucketHook:
    """Communication hook of a model: averages over the ranks like DDP's own, and notifies engines of reduced buckets.

    DDP keeps the hook permanently and allows only one: later optimizers join it. Without optimizers it only averages.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._receivers: list[_BucketReceiver] = []

    def join(self, optimizer: AdamW) -> None:
        """Notifies this optimizer from the next backward on; closed optimizers are removed."""
        self._receivers = [one for one in self._receivers if one.engine and one.optimizer() is not optimizer]
        self._receivers.append(_BucketReceiver(optimizer))

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        live = [(one, engine) for one in self._receivers if (engine := one.engine) is not None]
        for receiver, engine in live:
            receiver.begin(engine)
        buffer = bucket.buffer().div_(dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        pairs = [(engine, receiver.own_gradients(bucket)) for receiver, engine in live]

        def reduced(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            for engine, own in pairs:
                engine.gradients_reduced(own)
            return done.value()[0]

        return work.get_future().then(reduced)  # type: ignore[no-any-return]


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, _BucketHook] = weakref.WeakKeyDictionary()
"""Hooks by model, for models with Tidegate's hook."""


def _hook_of(model: DistributedDataParallel) -> _BucketHook:
    """The model's `_BucketHook`, registered if necessary. ConfigError when the model has another communication hook."""
    if model not in _hooks:
        buckets = _BucketHook(model)
        try:
            # DDP requires a hook's annotations to be types, not strings; a lambda has none.
            model.register_comm_hook(None, lambda _, bucket: buckets.reduce(bucket))
        except RuntimeError as error:
            raise ConfigError(
                f"overlap_ddp takes the communication hook of the {type(model).__name__}, of which there is one, and "
                "this model has a communication hook already (register_comm_hook). Do not register that one; or "
                "leave out overlap_ddp: gradients are then copied after the backward."
            ) from error
        _hooks[model] = buckets
    return _hooks[model]


def overlap_ddp(optimizer: AdamW, model: Any) -> None:
    """Copies gradients of a DDP model as its buckets are reduced, instead of after the backward.

    Call it before the first backward. It uses DDP's communication hook, which later optimizers of the model share.
    Changes of `.grad` between backward and `step()` take effect, as without it. ConfigError for a model that is not a
    DistributedDataParallel or has another hook, and with gradients="release", which would save nothing: the buckets
    hold the gradients.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"overlap_ddp takes a DistributedDataParallel, not a {type(model).__name__}.")
    if optimizer.offload.gradients != "keep":
        raise ConfigError('overlap_ddp needs gradients="keep": DDP holds gradients in its buckets anyway.')
    optimizer.follow_params()
    _hook_of(model).join(optimizer)
    optimizer.engine.gradients_come_reduced = True
