"""DistributedDataParallel: gradients are final when a bucket was reduced, and are copied from there.

Post-accumulate hooks fire before the all-reduce, so that an early copy would be of this rank's gradient alone.
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


class _Follower:
    """An optimizer whose engine hears of buckets. It is held weakly; once it is closed there is nobody to tell."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._numbers: dict[int, int] = {}
        self._numbered_by: Engine | None = None
        """Another engine may have other numbers: parameters were put into other groups."""
        self._announced = -1

    @property
    def engine(self) -> Engine | None:
        """None for an optimizer that is closed or collected."""
        optimizer = self.optimizer()
        return optimizer.engine if optimizer is not None and optimizer.engine.usable else None

    def begin(self, engine: Engine) -> None:
        """A bucket is about to be reduced."""
        if engine is not self._numbered_by or len(engine.params) != len(self._numbers):
            self._numbers, self._numbered_by = {id(p): i for i, p in enumerate(engine.params)}, engine
        engine.start()
        self._note_end_of_backward(engine)

    def own(self, bucket: dist.GradBucket) -> list[tuple[int, torch.Tensor]]:  # type: ignore[name-defined]
        """Its parameters that are in this bucket, by number, with their gradients."""
        numbers = [self._numbers.get(id(param)) for param in bucket.parameters()]
        return [(i, grad) for i, grad in zip(numbers, bucket.gradients(), strict=True) if i is not None]

    def _note_end_of_backward(self, engine: Engine) -> None:
        """DDP writes `.grad` in a callback at the backward's end, which it adds after ours: so ours adds another."""
        task = torch._C._current_graph_task_id()
        if task != self._announced:
            self._announced = task
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(engine.gradients.reduced_are_written))


class _Buckets:
    """The communication hook of a model: means over the ranks, as DDP's own, and tells engines when a bucket is there.

    DDP keeps it for good and takes no other: optimizers that come later join it. Without any, only the mean is left.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._followers: list[_Follower] = []

    def join(self, optimizer: AdamW) -> None:
        """This one hears of buckets from the next backward on; those that were closed are forgotten."""
        self._followers = [one for one in self._followers if one.engine and one.optimizer() is not optimizer]
        self._followers.append(_Follower(optimizer))

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        live = [(one, engine) for one in self._followers if (engine := one.engine) is not None]
        for follower, engine in live:
            follower.begin(engine)
        buffer = bucket.buffer().div_(dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        pairs = [(engine, follower.own(bucket)) for follower, engine in live]

        def reduced(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            for engine, own in pairs:
                engine.gradients_reduced(own)
            return done.value()[0]

        return work.get_future().then(reduced)  # type: ignore[no-any-return]


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, _Buckets] = weakref.WeakKeyDictionary()
"""Of the models that have ours."""


def _hook_of(model: DistributedDataParallel) -> _Buckets:
    """ConfigError for a model whose communication hook is somebody else's."""
    if model not in _hooks:
        buckets = _Buckets(model)
        try:
            # DDP wants the annotations of a hook as types, not as strings; or none.
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

    Call it before the first backward. It takes DDP's communication hook, which later optimizers of the model share.
    What is done to `.grad` between backward and `step()` is seen, as without it. ConfigError for what is not a
    DistributedDataParallel, for a model that has another hook, or with gradients="release", which would save nothing:
    the buckets hold the gradients.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"overlap_ddp takes a DistributedDataParallel, not a {type(model).__name__}.")
    if optimizer.offload.gradients != "keep":
        raise ConfigError('overlap_ddp needs gradients="keep": DDP holds gradients in its buckets anyway.')
    optimizer.follow_params()
    _hook_of(model).join(optimizer)
    optimizer.engine.gradients_come_reduced = True
