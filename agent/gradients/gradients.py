"""Gradients of the framework as the engine needs them: when they are ready, whether they changed since a copy.

Only the thread that runs the backward or `step()` looks at `.grad`; lanes see what it took down (`Arrived`). Autograd
replaces `.grad` without the interpreter's lock, so that another thread that looked could find half a pointer.

Mode `keep`: `.grad` stays. Copies before `step()` are speculative: `take` tells whether they still hold.
Mode `release`: a gradient that has arrived is the engine's, `.grad` only says so (`ReleasedGradient`); its memory is
given back when the last op that reads it was issued. Those of backward passes before the last one of a step stay in
`.grad` or, with `sums`, go to the host and come back as one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch

from tidegate.agent.devices.base import Device, Event, GradRef
from tidegate.agent.gradients.accumulation import HostSums
from tidegate.agent.gradients.gradient_record import Arrived, as_stored, check_gradient, form_of, own_alias
from tidegate.agent.gradients.release_bound import GradientMemory
from tidegate.agent.parameters.fingerprint import sample_view
from tidegate.agent.parameters.shards import as_part_of, check_divided_alike, shard_of
from tidegate.agent.parameters.subgroups import GRAD_DTYPES, Layout, flat, grad_dtype_of, is_dense
from tidegate.errors import ParameterError

Mode = Literal["keep", "release"]


class ReleasedGradient(torch.Tensor):
    """Stands in `.grad` for a gradient that was released: without memory, and whoever would use it is told so."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> ReleasedGradient:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=grad_dtype_of(like), device=like.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _released(func)

    def __setattr__(self, name: str, value: object) -> None:
        """torch dispatches everything but this, and would give it memory that nobody reads."""
        if name == "data":
            raise _released(".data = …")
        super().__setattr__(name, value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _released(what: object) -> ParameterError:
    return ParameterError(
        f"{what} on a gradient that was released when it had arrived (gradients='release'). Clip with "
        "max_grad_norm instead of clip_grad_norm_, put all but the last backward of a step into "
        "`with optimizer.accumulate():`, drop gradients with optimizer.zero_grad(); GradScaler needs "
        "gradients='keep'."
    )


def is_released(grad: torch.Tensor | None) -> bool:
    return grad is not None and isinstance(shard_of(grad), ReleasedGradient)


Taken = tuple[Arrived | None, ...]
"""What the gradients of a subgroup were when an op read them."""


@dataclass
class _Readiness:
    """How often a parameter's gradient was accumulated this step, and how often it was last step."""

    count: int = 0
    expected: int = 1


class Gradients:
    """See the module. `speculative`: gradients may be copied before `step()` although `.grad` stays."""

    def __init__(
        self,
        device: Device,
        params: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        mode: Mode = "keep",
        speculative: bool = True,
        sums: HostSums | None = None,
    ) -> None:
        """`sums`: where gradients of a backward that is not the last of its step go; None for `.grad`."""
        self.mode = mode
        self.sums = sums
        self.accumulating = False
        """A backward pass that is not the last of its step: `release` leaves `.grad` alone."""
        self.memory = GradientMemory()
        """Of gradients that are released."""
        self._device = device
        self._speculative = speculative and mode == "keep"
        self._params: list[torch.nn.Parameter] = []
        self._current: list[Arrived | None] = []
        self._present: list[bool] = []
        self._reads_left: list[int] = []
        self._readiness: list[_Readiness] = []
        self._subgroups_of: list[list[Layout]] = []
        self._reduced: list[int] = []
        """Parameters whose reduced gradient is not in `.grad` yet."""
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        # An optimizer that is collected takes its hooks along: the model may live on.
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._fire: Callable[[int], None] | None = None
        self._lock = threading.Lock()
        """Guards readiness and reads: collectives and lanes have threads of their own."""
        self.extend(params, layouts)

    def extend(self, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout]) -> None:
        """More parameters, behind those that are there. Frozen ones get the memory of a sum if they ever need it."""
        if self.sums is not None:
            for index, param in enumerate(params, start=len(self._params)):
                if param.requires_grad:
                    self.sums.stage(index, shard_of(param))
        self._params += params
        self._current += [None] * len(params)
        self._present += [False] * len(params)
        self._reads_left += [0] * len(params)
        self._readiness += [_Readiness() for _ in params]
        self._subgroups_of += [[] for _ in params]
        for layout in layouts:
            for segment in layout.segments:
                self._subgroups_of[segment.param].append(layout)
        self.watch_unfrozen()

    # ---- when they arrive

    def watch(self, on_gradient: Callable[[int], None]) -> None:
        """Calls the method `on_gradient(param)` whenever autograd has accumulated into a parameter.

        Its object is held weakly: a model must not keep an optimizer alive that nobody else holds.
        """
        method = weakref.WeakMethod(on_gradient)

        def fire(index: int) -> None:
            alive = method()
            if alive is not None:
                alive(index)

        self._fire = fire
        self.watch_unfrozen()

    def watch_unfrozen(self) -> None:
        """Parameters that were frozen when the optimizer was built are watched once they are not."""
        fire = self._fire
        if fire is None:
            return
        for index, param in enumerate(self._params):
            if index not in self._hooks and param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(lambda _, index=index: fire(index))
                self._hooks[index] = hook

    def accumulated(self, param: int) -> tuple[int, ...]:
        """Notes one accumulation; the subgroups whose gradients are all there now, as far as last step tells."""
        if self.accumulating and self.mode == "release":
            return ()
        self._check_not_released(param)
        self._bring_back(param)
        self._note(param)
        with self._lock:
            self._readiness[param].count += 1
            return tuple(layout.id for layout in self._subgroups_of[param] if self._is_ready(layout))

    def set_aside(self, param: int) -> None:
        """Notes one accumulation in a backward that is not the last of its step: without sums `.grad` has it."""
        whole = self._params[param]
        if self.sums is None or whole.grad is None:
            return
        self._check_not_released(param)
        check_divided_alike(param, whole, whole.grad)
        weight, grad = shard_of(whole), shard_of(whole.grad)
        check_gradient(param, weight, grad)
        self.sums.add(param, as_stored(weight, grad))
        whole.grad = None

    def _bring_back(self, param: int) -> None:
        """The sum of the backward passes before, if there is one, and what `.grad` has become one gradient."""
        whole = self._params[param]
        weight = shard_of(whole)
        total = self.sums.take(param, weight) if self.sums is not None else None
        if total is None:
            return
        with torch.no_grad():
            if whole.grad is None:
                whole.grad = as_part_of(whole, total.to(grad_dtype_of(weight)))
            else:
                shard_of(whole.grad).add_(total)  # in fp32 where one of them is, rounded once

    def _check_not_released(self, param: int) -> None:
        if self.mode == "release" and self._present[param]:
            raise ParameterError(
                f"Parameter {param} got a second gradient in one step after its first was released. "
                "Drop gradients with optimizer.zero_grad(), not model.zero_grad(), and put all but the last backward "
                "of a step into `with optimizer.accumulate():`. Under DDP, or where reentrant checkpoints share a "
                "weight, use gradients='keep'."
            )

    def reduced(self, param: int, grad: torch.Tensor) -> tuple[int, ...]:
        """Notes a gradient that a collective has made final, before it stands in `.grad`; as `accumulated`."""
        dense = as_stored(self._params[param], grad)
        self._device.adopt(dense)
        self._current[param] = Arrived(grad, None, own_alias(dense, grad), self._device.now())
        with self._lock:
            self._reduced.append(param)
            self._readiness[param].count += 1
            return tuple(layout.id for layout in self._subgroups_of[param] if self._is_ready(layout))

    def reduced_are_written(self) -> None:
        """What was noted by `reduced` stands in `.grad` now: from here on changes to that count."""
        with self._lock:
            params, self._reduced = self._reduced, []
        for param in params:
            arrived, grad = self._current[param], self._params[param].grad
            if arrived is not None and grad is not None:
                arrived.view = sample_view(grad) if grad.numel() else None
                arrived.sample = None if arrived.view is None else arrived.view.clone()
                arrived.tensor, arrived.form = grad, form_of(grad)

    def _is_ready(self, layout: Layout) -> bool:
        return all(self._readiness[s.param].count >= self._readiness[s.param].expected for s in layout.segments)

    def refresh(self) -> None:
        """`step()` begins: what `.grad` is now counts, whoever changed it since it arrived."""
        for param in self.set_aside_params:
            self._bring_back(param)
        for index, param_ in enumerate(self._params):
            replaced = param_.grad is not None and not is_released(param_.grad)
            if self.mode == "release" and self._present[index] and replaced:
                raise ParameterError(
                    f"The gradient of parameter {index} was replaced after it was released (gradients='release'). "
                    "Drop gradients with optimizer.zero_grad() first, or use gradients='keep'."
                )
        if self.mode == "keep":
            self._forget_changed()
        for param, arrived in enumerate(self._current):
            if self.mode == "keep" and arrived is not None:
                self._present[param] = True
            else:
                self._note(param)

    def _note(self, param: int) -> None:
        whole, known = self._params[param], self._current[param]
        self._present[param] = whole.grad is not None
        if whole.grad is None:
            self._current[param] = None
            return
        weight, grad = shard_of(whole), shard_of(whole.grad)
        if isinstance(grad, ReleasedGradient) or (known is not None and known.is_still(grad)):
            return
        check_divided_alike(param, whole, whole.grad)
        check_gradient(param, weight, grad)
        dense = as_stored(weight, grad)
        self._device.adopt(dense)
        # One whose elements share memory, or leave gaps, has no samples: it is taken anew at each look.
        form = form_of(grad) if dense is grad or is_dense(grad) else None
        arrived = Arrived(grad, form, own_alias(dense, grad), self._device.now())
        if self._speculative and form is not None and dense.numel():
            # Of what the user may change: a copy in the weight's order is ours.
            arrived.view = sample_view(grad)
            arrived.sample = arrived.view.clone()
        self._current[param] = arrived
        if self.mode == "release":
            self.memory.came(param, dense.numel() * dense.element_size())
            whole.grad = as_part_of(whole, ReleasedGradient(weight))

    def _forget_changed(self) -> None:
        """What was noted of gradients that are others now. Samples are read of those alone that lie where they lay: the
        memory of others may be gone."""
        for param, arrived in enumerate(self._current):
            grad = self._params[param].grad
            if arrived is not None and (grad is None or not arrived.is_still(shard_of(grad))):
                self._current[param] = None
        for param in self._changed_in_place():
            self._current[param] = None

    def _changed_in_place(self) -> list[int]:
        """Gradients that were changed through `.data` since they were noted, as far as samples show it."""
        sampled = [(i, a.view, a.sample) for i, a in enumerate(self._current) if a is not None and a.view is not None]
        found: list[int] = []
        for dtype in {sample.dtype for _, _, sample in sampled if sample is not None}:
            group = [(i, now, then) for i, now, then in sampled if then is not None and then.dtype == dtype]
            if not torch.equal(torch.cat([now for _, now, _ in group]), torch.cat([then for _, _, then in group])):
                found += [i for i, now, then in group if not torch.equal(now, then)]
        return found

    # ---- what lanes see

    def subgroups_of(self, param: int) -> list[Layout]:
        return self._subgroups_of[param]

    def take(self, layout: Layout) -> Taken:
        return tuple(self._current[segment.param] for segment in layout.segments)

    @property
    def present(self) -> list[bool]:
        """Which parameters have a gradient this step; complete after `refresh`."""
        return list(self._present)

    def reference(self, param: int) -> GradRef:
        arrived = self._current[param]
        assert arrived is not None, "only of gradients that are present"
        return reference(arrived)

    @property
    def set_aside_params(self) -> Sequence[int]:
        """Parameters whose gradients are in sums."""
        return self.sums.params() if self.sums is not None else ()

    @property
    def any_set_aside(self) -> bool:
        """Some gradients are in sums alone, `.grad` does not show them."""
        return self.sums is not None and self.sums.any

    # ---- memory of released gradients

    @property
    def any_released(self) -> bool:
        """Some gradients exist only in the plan in flight: it cannot be dropped without losing them."""
        return self.mode == "release" and any(self._present)

    def expect_reads(self, layouts: Sequence[Layout], room_bytes: int) -> None:
        """A plan begins: each of its ops that reads gradients on the device is here with the subgroup it reads.
        Gradients that are released may take `room_bytes`.

        A gradient that spans subgroups is read in each of them.
        """
        self._reads_left = [0] * len(self._params)
        for layout in layouts:
            for segment in layout.segments:
                self._reads_left[segment.param] += 1
        self.memory.expect(self._reads_left, room_bytes)

    def was_read(self, layout: Layout, taken: Taken, lane: str, done: Event) -> None:
        """An op that reads these gradients on the device is on its lane; whose last read it was lets go."""
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
        """`.grad` is free for the next step's gradients; what was released before is still used."""
        if self.mode == "release":
            for param in self._params:
                if is_released(param.grad):
                    param.grad = None

    # ---- a step's end

    def step_done(self) -> None:
        """What was seen this step is expected of the next."""
        for ready in self._readiness:
            ready.expected = max(ready.count, 1)
        self.forget()

    def forget(self) -> None:
        """Gradients were used or dropped: the step begins anew."""
        if self.sums is not None:
            self.sums.forget()
        for ready in self._readiness:
            ready.count = 0
        self._reduced.clear()
        self.memory.forget()
        self._current = [None] * len(self._params)
        self._present = [False] * len(self._params)
        self.clear_released()

    def close(self) -> None:
        _remove(self._hooks)
        self.forget()
        if self.sums is not None:
            self.sums.close()


def _remove(hooks: dict[int, torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()


def reference(arrived: Arrived) -> GradRef:
    dense = flat(arrived.dense)
    return GradRef(dense.data_ptr(), dense.numel(), GRAD_DTYPES[dense.dtype])
