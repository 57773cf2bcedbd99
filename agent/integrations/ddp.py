"""Integration with DistributedDataParallel (DDP): copies gradients as soon as DDP has reduced their bucket.

Hooks of torch that run after a gradient is accumulated run before DDP's all-reduce. A copy made there would contain the
gradient of this rank only.
"""

from __future__ import annotations

import weakref
from typing import Self

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tidegate.agent.engine.engine import Engine
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.optimizer.wrapped import OptimizerWrapper, unwrapped
from tidegate.errors import ConfigError


class _BucketReceiver:
    """One optimizer whose engine is notified when DDP has reduced a bucket of gradients. The optimizer is held by a
    weak reference, and is not notified after it was closed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._numbers: dict[int, int] = {}
        self._numbered_by: Engine | None = None
        """Engine whose parameter numbers are in `_numbers`. After a change of param groups the optimizer has another
        engine, which may number parameters differently."""
        self._announced = -1

    @property
    def engine(self) -> Engine | None:
        """The optimizer's engine; None when the optimizer is closed or garbage-collected."""
        optimizer = self.optimizer()
        return optimizer.engine if optimizer is not None and optimizer.engine.usable else None

    def begin(self, engine: Engine) -> None:
        """Starts the engine's plan, unless it is started already, and arranges that the engine is notified when DDP has
        written `.grad` at the end of the backward. To be called before each bucket is reduced."""
        if engine is not self._numbered_by or len(engine.params) != len(self._numbers):
            self._numbers, self._numbered_by = {id(p): i for i, p in enumerate(engine.params)}, engine
        engine.start()
        self._note_end_of_backward(engine)

    def own_gradients(self, bucket: dist.GradBucket) -> list[tuple[int, torch.Tensor]]:  # type: ignore[name-defined]
        """Parameters of the optimizer in this bucket: the number and the gradient of each."""
        numbers = [self._numbers.get(id(param)) for param in bucket.parameters()]
        return [(i, grad) for i, grad in zip(numbers, bucket.gradients(), strict=True) if i is not None]

    def _note_end_of_backward(self, engine: Engine) -> None:
        """Queues a callback that notifies the engine after DDP has written `.grad`. DDP writes `.grad` in a callback of
        its own at the end of the backward, which is queued later than the one queued here. Therefore the callback
        queued here only queues a second callback, which runs after DDP's."""
        task = torch._C._current_graph_task_id()
        if task != self._announced:
            self._announced = task
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(engine.gradients.reduced_are_written))


class _BucketHook:
    """Communication hook of a DDP model. It averages gradients over the ranks like DDP's own hook, and notifies engines
    of reduced buckets.

    DDP allows one hook per model and keeps it permanently, so all optimizers of the model share this hook. Without
    optimizers the hook only averages.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._receivers: list[_BucketReceiver] = []

    def join(self, optimizer: Optimizer) -> _BucketReceiver:
        """Adds an optimizer, which is notified from the next backward on, and removes closed optimizers."""
        self._receivers = [one for one in self._receivers if one.engine and one.optimizer() is not optimizer]
        receiver = _BucketReceiver(optimizer)
        self._receivers.append(receiver)
        return receiver

    def leave(self, receiver: _BucketReceiver) -> bool:
        """Stops notifying this receiver. Returns False if it was already removed or replaced."""
        was_in = receiver in self._receivers
        self._receivers = [one for one in self._receivers if one is not receiver]
        return was_in

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
                engine.routing.reduced(own)
            return done.value()[0]

        return work.get_future().then(reduced)  # type: ignore[no-any-return]


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, _BucketHook] = weakref.WeakKeyDictionary()
"""Tidegate's hook of each DDP model that has one."""


def _hook_of(model: DistributedDataParallel) -> _BucketHook:
    """Returns the model's `_BucketHook`, and registers one if there is none. ConfigError when the model has another
    communication hook."""
    if model not in _hooks:
        buckets = _BucketHook(model)
        try:
            # DDP requires a hook's annotations to be types, not strings; a lambda has none.
            model.register_comm_hook(None, lambda _, bucket: buckets.reduce(bucket))
        except RuntimeError as error:
            raise ConfigError(
                f"overlap_ddp registers a communication hook, and {type(model).__name__} allows only one: this model "
                "has one already (register_comm_hook). Do not register that hook; or leave out overlap_ddp: gradients "
                "are then copied after the backward."
            ) from error
        _hooks[model] = buckets
    return _hooks[model]


class DdpOverlap:
    """Handle for early copies: gradients of a DDP model are copied while its backward runs. Made by `overlap_ddp`;
    ended by `close()`, a `with` block or `optimizer.close()`."""

    def __init__(self, optimizer: Optimizer, model: DistributedDataParallel) -> None:
        optimizer._follow_params()
        self._hook = _hook_of(model)
        self._receiver = self._hook.join(optimizer)
        optimizer.gradient_source.collectives.add(self._hook)

    def close(self) -> None:
        """Stops the early copies: gradients are copied after the backward again, as without `overlap_ddp`. Idempotent.
        Call it between steps.

        DDP cannot remove a communication hook from a model. Tidegate's hook stays and averages over the ranks, as DDP
        itself does.
        """
        optimizer = self._receiver.optimizer()
        if self._hook.leave(self._receiver) and optimizer is not None:
            optimizer.gradient_source.collectives.discard(self._hook)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def overlap_ddp(optimizer: torch.optim.Optimizer | OptimizerWrapper, model: DistributedDataParallel) -> DdpOverlap:
    """Copies each gradient of a DDP model when DDP has reduced the bucket with it, instead of after the backward.
    `close()` of the returned handle ends these early copies; so does `optimizer.close()`.

    optimizer: a `tidegate.AdamW`, or a wrapper of a framework that holds one.
    model: the DistributedDataParallel that holds the optimizer's parameters, or some of them.

    Call this function before the first backward. It registers a communication hook, which all optimizers of the model
    share. A second call for the same optimizer and model replaces the first handle. Changes of `.grad` between backward
    and `step()` take effect, as they do without early copies.

    Raises ConfigError, with nothing changed, for another optimizer, and for a model that is not a
    DistributedDataParallel, has no parameter of the optimizer, or has another communication hook. Raises it also with
    gradients="release", which would save no memory, because DDP's buckets hold the gradients.
    """
    inner = unwrapped(optimizer, "overlap_ddp")
    _require_early_copies(inner, model)
    return DdpOverlap(inner, model)


def _require_early_copies(optimizer: Optimizer, model: object) -> None:
    """Raises ConfigError unless gradients of this optimizer can be copied from the buckets of this model."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"overlap_ddp takes the DistributedDataParallel around the model, not a {type(model).__name__}."
        )
    if optimizer.offload.gradients != "keep":
        raise ConfigError(
            'The optimizer has gradients="release", which overlap_ddp cannot use: DDP holds gradients in its buckets '
            'anyway. Build the optimizer with Offload(gradients="keep").'
        )
    inside = {id(param) for param in model.parameters()}
    if not any(id(param) in inside for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            f"overlap_ddp was given a {type(model).__name__} without any parameter of the optimizer: give the one that "
            "wraps the model whose parameters the optimizer has."
        )
