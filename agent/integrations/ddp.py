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
from tidegate.agent.optimizer import AdamW
from tidegate.errors import ConfigError


class _Buckets:
    """The communication hook: means over the ranks, as DDP's own, and tells the engine when a bucket is there.

    DDP keeps it for good; the optimizer is held weakly, and once it is closed only the mean is left.
    """

    def __init__(self, optimizer: AdamW, model: DistributedDataParallel) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._group = model.process_group
        self._numbers: dict[int, int] = {}
        self._numbered_by: Engine | None = None
        """Another engine may have other numbers: parameters were put into other groups."""
        self._announced = -1

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        optimizer = self._optimizer()
        engine = optimizer.engine if optimizer is not None and optimizer.engine.usable else None
        if optimizer is not None and engine is not None:
            if engine is not self._numbered_by or len(engine.params) != len(self._numbers):
                self._numbers, self._numbered_by = {id(p): i for i, p in enumerate(engine.params)}, engine
            engine.start()
            self._note_end_of_backward(engine)
        buffer = bucket.buffer().div_(dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        numbers = [self._numbers.get(id(param)) for param in bucket.parameters()]
        pairs = [(i, grad) for i, grad in zip(numbers, bucket.gradients(), strict=True) if i is not None]

        def reduced(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if engine is not None:
                engine.gradients_reduced(pairs)
            return done.value()[0]

        return work.get_future().then(reduced)  # type: ignore[no-any-return]

    def _note_end_of_backward(self, engine: Engine) -> None:
        """DDP writes `.grad` in a callback at the backward's end, which it adds after ours: so ours adds another."""
        task = torch._C._current_graph_task_id()
        if task != self._announced:
            self._announced = task
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(engine.gradients.reduced_are_written))


def overlap_ddp(optimizer: AdamW, model: Any) -> None:
    """Copies gradients of a DDP model as its buckets are reduced, instead of after the backward.

    Call it once, before the first backward. It takes DDP's communication hook. What is done to `.grad` between backward
    and `step()` is seen, as without it. ConfigError for what is not a DistributedDataParallel, or with
    gradients="release", which would save nothing: the buckets hold the gradients.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"overlap_ddp takes a DistributedDataParallel, not a {type(model).__name__}.")
    if optimizer.offload.gradients != "keep":
        raise ConfigError('overlap_ddp needs gradients="keep": DDP holds gradients in its buckets anyway.')
    optimizer.follow_params()
    optimizer.engine.gradients_come_reduced = True
    buckets = _Buckets(optimizer, model)
    # DDP wants the annotations of a hook as types, not as strings; or none.
    model.register_comm_hook(None, lambda _, bucket: buckets.reduce(bucket))
