"""Tracks the gradients of the framework for the engine: when they are ready, and whether they changed after a copy.

Only the thread that runs the backward or `step()` reads `.grad`; lanes use records of it (`GradientRecord`). Autograd
replaces `.grad` without the interpreter lock (GIL), so that another thread could read an inconsistent pointer.

Mode `keep`: gradients stay in `.grad`. Copies before `step()` are speculative: a copy is valid if `records_of` still
gives the records that were copied.
Mode `release`: the engine owns a gradient that has arrived, and `.grad` holds a placeholder (`ReleasedGradient`). The
memory is released when the last op that reads the gradient was issued. Gradients of backward passes before the last one
of a step stay in `.grad` or, with `accumulation="host"`, are added up on the host and copied back once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tidegate.agent.devices.base import Device, Event, GradRef
from tidegate.agent.gradients.accumulation import HostSums
from tidegate.agent.gradients.gradient_memory import GradientMemory
from tidegate.agent.gradients.gradient_record import (
    GradientRecord,
    as_stored,
    check_gradient,
    has_other_owner,
    identity_of,
    private_alias,
)
from tidegate.agent.gradients.released_gradient import ReleasedGradient, is_released
from tidegate.agent.parameters.fingerprint import sample_view
from tidegate.agent.parameters.shards import check_divided_alike, gradients_are_final, shard_of, wrap_like
from tidegate.agent.parameters.subgroups import GRAD_DTYPES, Layout, address_of, grad_dtype_of, is_dense
from tidegate.errors import ParameterError

Mode = Literal["keep", "release"]


GradientsRead = tuple[GradientRecord | None, ...]
"""The records of a subgroup's gradients that an op has read, one for each part of a parameter in the subgroup."""


@dataclass
class _ArrivalCount:
    """Number of times that autograd accumulated the gradient of a parameter: `count` in this step, `expected` in the
    last step."""

    count: int = 0
    expected: int = 1


class Gradients:
    """Tracks the gradients of one optimizer. In mode `keep`, gradients stay in `.grad`; in mode `release`, the engine
    takes each gradient out of `.grad` and frees its memory early.

    speculative: whether gradients may be copied before `step()` in mode `keep`.
    """

    def __init__(
        self,
        device: Device,
        params: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        mode: Mode = "keep",
        speculative: bool = True,
        sums: HostSums | None = None,
    ) -> None:
        """`sums`: sums in host memory for the gradients of backward passes before the last one of a step; None leaves
        these gradients in `.grad`."""
        self.mode = mode
        self.sums = sums
        self.memory = GradientMemory()
        """Counts the device memory of released gradients."""
        self._device = device
        self._speculative = speculative and mode == "keep"
        self._params: list[torch.nn.Parameter] = []
        self._current: list[GradientRecord | None] = []
        self._present: list[bool] = []
        self._reads_left: list[int] = []
        self._counts: list[_ArrivalCount] = []
        self._subgroups_of: list[list[Layout]] = []
        self._reduced: list[int] = []
        """Parameters whose reduced gradient is not in `.grad` yet."""
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        # When the optimizer is collected, this removes its hooks from the model, which may still be used.
        weakref.finalize(self, _remove_hooks, self._hooks).atexit = False
        self._on_gradient: Callable[[int], None] | None = None
        self._lock = threading.Lock()
        """Guards the counts of arrivals and of reads: collectives and lanes run in other threads."""
        self.extend(params, layouts)

    def extend(self, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout]) -> None:
        """Appends parameters and their subgroups. Memory for sums is allocated now, except that of frozen parameters,
        which is allocated at their first gradient."""
        if self.sums is not None:
            for index, param in enumerate(params, start=len(self._params)):
                if param.requires_grad:
                    self.sums.allocate(index, shard_of(param))
        self._params += params
        self._current += [None] * len(params)
        self._present += [False] * len(params)
        self._reads_left += [0] * len(params)
        self._counts += [_ArrivalCount() for _ in params]
        self._subgroups_of += [[] for _ in params]
        for layout in layouts:
            for segment in layout.segments:
                self._subgroups_of[segment.param].append(layout)
        self.watch_unfrozen()

    # ---- arrival

    def watch(self, on_gradient: Callable[[int], None]) -> None:
        """Sets the method that is called with the number of a parameter whenever autograd has accumulated its gradient.

        Keeps only a weak reference to the method's object, so that a model does not keep its optimizer alive.
        """
        method = weakref.WeakMethod(on_gradient)

        def call(index: int) -> None:
            alive = method()
            if alive is not None:
                alive(index)

        self._on_gradient = call
        self.watch_unfrozen()

    def watch_unfrozen(self) -> None:
        """Registers hooks on the parameters that require gradients and have no hook yet, for example because they were
        frozen before."""
        on_gradient = self._on_gradient
        if on_gradient is None:
            return
        for index, param in enumerate(self._params):
            if index not in self._hooks and param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(lambda _, index=index: on_gradient(index))
                self._hooks[index] = hook

    def accumulated(self, param: int) -> tuple[int, ...]:
        """Records that autograd has accumulated the gradient of a parameter. Returns the ids of the subgroups whose
        gradients are complete now, which means that each arrived as often as in the last step."""
        self._check_not_released(param)
        self._restore_sum(param)
        self._record(param)
        with self._lock:
            self._counts[param].count += 1
            return tuple(layout.id for layout in self._subgroups_of[param] if self._is_ready(layout))

    def add_to_sum(self, param: int) -> None:
        """Adds the gradient of a parameter, from a backward that is not the last of its step, to its sum on the host.
        If there are no sums on the host, the gradient stays in `.grad`."""
        whole = self._params[param]
        if self.sums is None or whole.grad is None:
            return
        self._check_not_released(param)
        check_divided_alike(param, whole, whole.grad)
        weight, grad = shard_of(whole), shard_of(whole.grad)
        check_gradient(param, weight, grad)
        self.sums.add(param, as_stored(weight, grad))
        whole.grad = None

    def _restore_sum(self, param: int) -> None:
        """Adds the sum of earlier backward passes, if there is one, to `.grad`."""
        whole = self._params[param]
        weight = shard_of(whole)
        total = self.sums.take_to_device(param, weight) if self.sums is not None else None
        if total is None:
            return
        with torch.no_grad():
            if whole.grad is None:
                whole.grad = wrap_like(whole, total.to(grad_dtype_of(weight)))
            else:
                shard_of(whole.grad).add_(total)  # in fp32 if either is fp32, rounded once

    def _check_not_released(self, param: int) -> None:
        if self.mode == "release" and self._present[param]:
            raise ParameterError(
                f"Parameter {param} got a second gradient in one step after its first was released. "
                "Drop gradients with optimizer.zero_grad(), not model.zero_grad(), and put all but the last backward "
                "of a step into `with optimizer.accumulate():`. Under DistributedDataParallel (DDP), or where "
                "reentrant checkpoints share a weight, use gradients='keep'."
            )

    def reduced(self, param: int, grad: torch.Tensor) -> tuple[int, ...]:
        """Records a gradient that a collective has reduced over the ranks and has not written to `.grad` yet. Returns
        the ids of the subgroups whose gradients are complete now: each arrived as often as in the last step."""
        dense = as_stored(self._params[param], grad)
        self._device.adopt(dense)
        self._current[param] = GradientRecord(grad, None, private_alias(dense, grad), self._device.now())
        with self._lock:
            self._reduced.append(param)
            self._counts[param].count += 1
            return tuple(layout.id for layout in self._subgroups_of[param] if self._is_ready(layout))

    def reduced_are_written(self) -> None:
        """Records that gradients given to `reduced` are in `.grad` now, so that later changes of it are detected."""
        with self._lock:
            params, self._reduced = self._reduced, []
        for param in params:
            arrived, grad = self._current[param], self._params[param].grad
            if arrived is not None and grad is not None:
                arrived.view = sample_view(grad) if grad.numel() else None
                arrived.sample = None if arrived.view is None else arrived.view.clone()
                arrived.tensor, arrived.identity = grad, identity_of(grad)

    def _is_ready(self, layout: Layout) -> bool:
        """Whether each gradient of the subgroup arrived as often as in the last step. The caller must hold the lock."""
        return all(self._counts[s.param].count >= self._counts[s.param].expected for s in layout.segments)

    def refresh(self) -> None:
        """Adds the sums on the host to `.grad`, and records the gradients that are in `.grad` now, with all changes
        since they arrived. To be called when `step()` begins."""
        for param in self.params_with_sums:
            self._restore_sum(param)
        for index, param_ in enumerate(self._params):
            replaced = param_.grad is not None and not is_released(param_.grad)
            if self.mode == "release" and self._present[index] and replaced:
                raise ParameterError(
                    f"The gradient of parameter {index} was replaced after it was released (gradients='release'). "
                    "Drop gradients with optimizer.zero_grad() first, or use gradients='keep'."
                )
        if self.mode == "keep":
            self._drop_changed_records()
        for param, arrived in enumerate(self._current):
            if self.mode == "keep" and arrived is not None:
                self._present[param] = True
            else:
                self._record(param)

    def _record(self, param: int) -> None:
        """Records the present `.grad` of a parameter, unless it is recorded and unchanged. In mode `release` takes the
        gradient, and puts the placeholder into `.grad`."""
        whole, known = self._params[param], self._current[param]
        self._present[param] = whole.grad is not None
        if whole.grad is None:
            self._current[param] = None
            return
        weight, grad = shard_of(whole), shard_of(whole.grad)
        if isinstance(grad, ReleasedGradient) or (known is not None and known.is_unchanged(grad)):
            return
        check_divided_alike(param, whole, whole.grad)
        check_gradient(param, weight, grad)
        if self.mode == "release" and not gradients_are_final(whole) and has_other_owner(grad):
            grad = grad.detach().clone()  # autograd could add to its memory before a lane has read it
        dense = as_stored(weight, grad)
        self._device.adopt(dense)
        # A gradient whose elements share memory, or leave gaps, cannot be sampled: each check records it again.
        form = identity_of(grad) if dense is grad or is_dense(grad) else None
        arrived = GradientRecord(grad, form, private_alias(dense, grad), self._device.now())
        if self._speculative and form is not None and dense.numel():
            # Samples of `grad`, which the user may change; `dense` may be a copy that the user does not see.
            arrived.view = sample_view(grad)
            arrived.sample = arrived.view.clone()
        self._current[param] = arrived
        if self.mode == "release":
            self.memory.add(param, dense.numel() * dense.element_size())
            whole.grad = wrap_like(whole, ReleasedGradient(weight))

    def _drop_changed_records(self) -> None:
        """Drops the records of gradients that were changed or replaced since they were recorded. Samples are compared
        only for gradients that are still in the recorded memory, because other memory may be freed."""
        for param, arrived in enumerate(self._current):
            grad = self._params[param].grad
            if arrived is not None and (grad is None or not arrived.is_unchanged(shard_of(grad))):
                self._current[param] = None
        for param in self._changed_in_place():
            self._current[param] = None

    def _changed_in_place(self) -> list[int]:
        """Parameters whose gradients were changed through `.data` since they were recorded, as far as samples show
        it."""
        sampled = [(i, a.view, a.sample) for i, a in enumerate(self._current) if a is not None and a.view is not None]
        changed: list[int] = []
        for dtype in {sample.dtype for _, _, sample in sampled if sample is not None}:
            group = [(i, now, then) for i, now, then in sampled if then is not None and then.dtype == dtype]
            if not torch.equal(torch.cat([now for _, now, _ in group]), torch.cat([then for _, _, then in group])):
                changed += [i for i, now, then in group if not torch.equal(now, then)]
        return changed

    # ---- for lanes

    def subgroups_of(self, param: int) -> list[Layout]:
        """The subgroups that hold a part of this parameter."""
        return self._subgroups_of[param]

    def records_of(self, layout: Layout) -> GradientsRead:
        """The records of a subgroup's gradients by segment (part of a parameter); None where there is no gradient."""
        return tuple(self._current[segment.param] for segment in layout.segments)

    def record(self, param: int) -> GradientRecord | None:
        """The record of a parameter's gradient; None if there is no gradient."""
        return self._current[param]

    @property
    def present(self) -> list[bool]:
        """For each parameter, whether it has a gradient in this step; complete after `refresh`."""
        return list(self._present)

    def reference(self, param: int) -> GradRef:
        """Address, size and dtype of a parameter's gradient, which must be present."""
        arrived = self._current[param]
        assert arrived is not None, "the parameter has no gradient"
        return grad_ref_of(arrived)

    @property
    def params_with_sums(self) -> Sequence[int]:
        """Parameters that have a sum of gradients on the host, which is not in `.grad`."""
        return self.sums.params() if self.sums is not None else ()

    # ---- memory of released gradients

    @property
    def any_released(self) -> bool:
        """Whether some gradients are released and held only for the running plan: if this plan is dropped, these
        gradients are lost."""
        return self.mode == "release" and any(self._present)

    def expect_reads(self, layouts: Sequence[Layout], room_bytes: int) -> None:
        """Counts how often the ops of a new plan will read each gradient, so that the memory of a gradient is released
        after its last read. To be called when a plan begins.

        layouts: the subgroup of each op that reads gradients on the device, once for each op. A gradient that spans
            several subgroups is read once in each of them.
        room_bytes: device memory for released gradients.
        """
        self._reads_left = [0] * len(self._params)
        for layout in layouts:
            for segment in layout.segments:
                self._reads_left[segment.param] += 1
        self.memory.expect(self._reads_left, room_bytes)

    def was_read(self, layout: Layout, taken: GradientsRead, lane: str, done: Event) -> None:
        """In mode `release`, counts a read of gradients on the device, and drops the records of gradients that no later
        op reads. To be called when the op that reads them was issued.

        taken: the records that the op reads.
        lane: lane of the op.
        done: event at the end of the op.
        """
        if self.mode == "keep":
            return
        for segment, arrived in zip(layout.segments, taken, strict=True):
            if arrived is not None:
                self._device.used_by(lane, arrived.dense)
            with self._lock:
                self._reads_left[segment.param] -= 1
                if self._reads_left[segment.param] == 0:
                    self._current[segment.param] = None
        self.memory.read([segment.param for segment in layout.segments], done)

    def clear_released(self) -> None:
        """Sets `.grad` to None where it holds a placeholder; the update may still use the released gradients."""
        if self.mode == "release":
            for param in self._params:
                if is_released(param.grad):
                    param.grad = None

    # ---- a step's end

    def step_done(self) -> None:
        """Ends the step. The next step is expected to accumulate each gradient as often as this one."""
        for ready in self._counts:
            ready.expected = max(ready.count, 1)
        self.forget()

    def forget(self) -> None:
        """Drops all records, counts and sums, because the gradients were used or dropped."""
        if self.sums is not None:
            self.sums.discard()
        for ready in self._counts:
            ready.count = 0
        self._reduced.clear()
        self.memory.forget()
        self._current = [None] * len(self._params)
        self._present = [False] * len(self._params)
        self.clear_released()

    def close(self) -> None:
        """Removes the hooks and drops all gradients and sums."""
        _remove_hooks(self._hooks)
        self.forget()
        if self.sums is not None:
            self.sums.close()


def _remove_hooks(hooks: dict[int, torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()


def grad_ref_of(arrived: GradientRecord) -> GradRef:
    """Address, size and dtype of a recorded gradient."""
    dense = arrived.dense
    return GradRef(address_of(dense), dense.numel(), GRAD_DTYPES[dense.dtype])
