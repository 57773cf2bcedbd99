"""Trains with `tidegate.AdamW` on the CUDA device over the fake runtime, and tells the fake what everybody else does.

Everybody else: autograd, which writes gradients; the model, which reads weights; the user, who changes both; and host
threads, which update on the CPU and read state for checkpoints.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pytest
import torch

import tidegate
from tests.agent.devices.fake_cuda import FakeCuda, apply
from tests.agent.devices.fake_memory import OnDevice
from tests.agent.devices.vector_clocks import Clock
from tests.agent.engine.test_exactness import backward
from tests.agent.plain_adamw import PlainAdamW, array
from tidegate.agent.devices.base import UpdateRun
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.engine import executor as executor_module
from tidegate.agent.engine import op_runner as runner_module
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.agent.engine.prepared_ops import OpPreparer
from tidegate.agent.gradients import accumulation as accumulation_module
from tidegate.agent.gradients import gradients as gradients_module
from tidegate.agent.optimizer import offloaded_optimizer as optimizer_module
from tidegate.agent.parameters.subgroups import flat
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.agent.tiers.transfers import Transfer
from tidegate.kernels import ThreadPool
from tidegate.kernels.dispatch import Lanes
from tidegate.plan.ops import Op


class WatchedLock:
    """A lock whose handover orders what threads do."""

    def __init__(self, fake: FakeCuda) -> None:
        self._lock, self._fake, self._known = threading.Lock(), fake, Clock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got = self._lock.acquire(blocking, timeout)
        if got:
            self._fake.acquired(self._known)
        return got

    def release(self) -> None:
        self._fake.releasing(self._known)
        self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WatchedDevice(CudaDevice):
    """Tells of host memory that is zeroed, and of tensors of the framework that are made and freed."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__(fake)
        self._fake = fake
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        buffer = super().host_buffer(nbytes)
        self._fake.host_access(buffer.data_ptr(), nbytes, True, "zeroing host memory")
        return buffer

    def adopt(self, tensor: torch.Tensor) -> None:
        known = self._known.get(id(tensor))
        if isinstance(tensor, torch.nn.Parameter) or (known is not None and known() is tensor):
            return
        self._known[id(tensor)] = weakref.ref(tensor)
        self._fake.framework_access(tensor, True, "making a tensor")
        nbytes = tensor.numel() * tensor.element_size()
        freed = weakref.finalize(
            tensor, self._fake.framework_frees, tensor.data_ptr(), nbytes, tensor.untyped_storage()
        )
        freed.atexit = False


@contextmanager
def watched(fake: FakeCuda) -> Iterator[None]:
    """Optimizers that are built inside work on the CUDA device over `fake`, and host threads are watched. No op is
    prepared, because the fake does not see what native tasks read and write: these ops run where it sees them, after
    the same waits."""
    arrays_of, fetch, flush = StateMemory.arrays, TierStore.fetch, TierStore.flush

    class WatchedLanes(Lanes):
        """Lanes whose calls order what threads do: what a thread did before its call is done before what other threads
        do after theirs."""

        def __init__(self, ahead: list[bool]) -> None:
            super().__init__(ahead)
            self._known = Clock()

    def ordering(name: str) -> Callable[..., Any]:
        call = getattr(Lanes, name)

        def ordered(lanes: WatchedLanes, *arguments: Any) -> Any:
            fake.releasing(lanes._known)
            answer = call(lanes, *arguments)
            fake.acquired(lanes._known)
            return answer

        return ordered

    for name in ("start", "take", "queued", "ended", "open_gradients", "step", "drop", "wait", "forget"):
        setattr(WatchedLanes, name, ordering(name))

    def host_update(run: UpdateRun, pool: ThreadPool) -> None:
        fake.host_update(run)
        apply(run, pool)

    @contextmanager
    def watched_arrays(memory: StateMemory, subgroup: int, changed: bool = True) -> Iterator[dict[str, torch.Tensor]]:
        with arrays_of(memory, subgroup, changed) as arrays:
            for array in arrays.values():
                nbytes = array.numel() * array.element_size()
                fake.require_host(array.data_ptr(), nbytes)
                fake.host_access(array.data_ptr(), nbytes, True, "reading and writing state on the host")
            yield arrays

    def watched_fetch(store: TierStore, path: str, subgroup: int, address: int, *begun: Callable[[], None]) -> Transfer:
        fake.host_access(address, store._kinds[subgroup].data_bytes, True, "a fetch")
        return fetch(store, path, subgroup, address, *begun)

    def watched_flush(store: TierStore, path: str, subgroup: int, address: int, *begun: Callable[[], None]) -> Transfer:
        fake.host_access(address, store._kinds[subgroup].data_bytes, False, "a flush")
        return flush(store, path, subgroup, address, *begun)

    def address_on_device(tensor: torch.Tensor) -> int:
        return OnDevice(flat(tensor)).data_ptr()

    fake.strict = True
    with pytest.MonkeyPatch.context() as patch:
        for module in (runner_module, gradients_module, accumulation_module):
            patch.setattr(module, "address_of", address_on_device)
        patch.setattr(optimizer_module, "choose_device", lambda *_: WatchedDevice(fake))
        patch.setattr(executor_module, "Lanes", WatchedLanes)
        patch.setattr(OpPreparer, "_prepared", lambda *_: {})
        patch.setattr(UpdateRun, "apply", host_update)
        patch.setattr(StateMemory, "arrays", watched_arrays)
        patch.setattr(TierStore, "fetch", watched_fetch)
        patch.setattr(TierStore, "flush", watched_flush)
        yield


@dataclass
class FakeTraining:
    """One optimizer and the oracle that it is held against. Every method is what a training script does."""

    fake: FakeCuda
    params: list[torch.nn.Parameter]
    optimizer: tidegate.AdamW
    plain: PlainAdamW
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients as autograd left them: in mode `release` the engine takes them away."""
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Address and bytes of each of these."""

    def forward(self) -> None:
        """Reads each weight when the optimizer says that it may be read; what is read must be what the oracle has."""
        for i, param in enumerate(self.params):
            self.optimizer._wait_for_weights([i])
            self.fake.framework_access(param.detach(), False, "the forward reading a weight")
            weight = self.plain.params[i].weight
            assert np.array_equal(weight.view(np.uint8), array(param).view(np.uint8)), f"weight {i} is not the oracle's"

    def backward(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Adds to the gradients, through autograd, so that hooks fire."""
        self.forward()
        backward(self.params, list(grads))

    def grad_written(self, param: torch.Tensor) -> None:
        """Called by autograd, before the optimizer."""
        assert param.grad is not None
        self.fake.framework_access(param.grad, True, "the backward writing a gradient")
        index = next(i for i, mine in enumerate(self.params) if mine is param)
        self.arrived[index] = param.grad.detach().clone()
        self.places[index] = (param.grad.data_ptr(), param.grad.numel() * param.grad.element_size())

    def zero_grad(self, set_to_none: bool = True) -> None:
        zeroed = [p.grad for p in self.params if p.grad is not None]
        self.optimizer.zero_grad(set_to_none)
        for grad in () if set_to_none else zeroed:
            self.fake.framework_access(grad, True, "zeroing a gradient")
        self.arrived.clear()

    def scale_grads(self, factor: float, params: Sequence[torch.nn.Parameter] = ()) -> None:
        """As clip_grad_norm_ and unscale_ do, after the backward. Of all parameters, unless some are given."""
        with torch.no_grad():
            for param in params or self.params:
                if param.grad is not None:
                    self.fake.framework_access(param.grad, True, "scaling a gradient")
                    param.grad.mul_(factor)

    def poison_grads(self) -> None:
        """An overflow: the step must be skipped."""
        grads = [param.grad for param in self.params if param.grad is not None]
        self.fake.framework_access(grads[-1], True, "an overflow")
        grads[-1].view(-1)[0] = float("inf")

    def discard_grads(self) -> None:
        """Not by `zero_grad` of the optimizer: it is not told."""
        for param in self.params:
            param.grad = None

    def assign_grad(self, index: int) -> None:
        """A gradient from elsewhere, in another order in memory."""
        param = self.params[index]
        values = torch.randn(param.shape[::-1], generator=torch.Generator().manual_seed(index)).to(param.dtype)
        param.grad = values.permute(*reversed(range(values.dim())))
        self.fake.framework_access(param.grad, True, "making a gradient elsewhere")

    def edit(self, index: int, value: float) -> None:
        self.optimizer.wait()
        param, plain = self.params[index], self.plain.params[index]
        with torch.no_grad():
            self.fake.framework_access(param.detach(), True, "setting a weight")
            param.mul_(value)
        fresh = PlainAdamW([{"params": [param]}]).params[0]
        plain.weight, plain.aux = fresh.weight, fresh.aux

    def train(self, grads: Sequence[torch.Tensor | None]) -> None:
        """One whole step."""
        self.zero_grad()
        self.backward(grads)
        self.step()

    def weights(self) -> list[torch.Tensor]:
        self.forward()
        return [param.detach().clone() for param in self.params]

    def restore(self, weights: Sequence[torch.Tensor], state: Mapping[str, Any]) -> None:
        """From a checkpoint: weights first, then their state."""
        with torch.no_grad():
            for param, weight in zip(self.params, weights, strict=True):
                self.fake.framework_access(param.detach(), True, "loading a weight")
                param.copy_(weight)
        self.optimizer.load_state_dict(state)

    @contextmanager
    def broken_lane(self, lane: str, after: int) -> Iterator[None]:
        """The lane raises at its op number `after`, from 0."""
        runner = self.optimizer.engine._runner
        run, seen = type(runner).run, itertools.count()

        def failing(op: Op, begun: Callable[[], None]) -> IssuedOp:
            if op.lane == lane and next(seen) == after:
                raise ValueError("broken on purpose")
            return run(runner, op, begun)

        runner.run = failing  # type: ignore[method-assign]
        try:
            yield
        finally:
            del runner.run

    def step(self) -> None:
        if self.optimizer.offload.gradients == "release":
            grads = [self.arrived.get(i) for i in range(len(self.params))]
        else:
            grads = [None if p.grad is None else p.grad.detach().clone() for p in self.params]
        self.optimizer.step()
        self.plain.step(grads)


@contextmanager
def fake_training(
    fake: FakeCuda, params: list[torch.nn.Parameter], max_grad_norm: float | None = None, **offload: Any
) -> Iterator[FakeTraining]:
    chosen = tidegate.Offload(watchdog_seconds=30.0, cpu_threads=1, **offload)
    with watched(fake):
        training: FakeTraining | None = None

        def grad_written(param: torch.Tensor) -> None:
            if training is not None:
                training.grad_written(param)

        # Before the optimizer's own hooks.
        hooks = [param.register_post_accumulate_grad_hook(grad_written) for param in params]
        optimizer = tidegate.AdamW(params, lr=0.03, max_grad_norm=max_grad_norm, offload=chosen)
        try:
            plain = PlainAdamW([dict(group) for group in optimizer.param_groups], max_grad_norm)
            training = FakeTraining(fake, params, optimizer, plain)
            yield training
        except BaseException:
            # A fake that found a race does nothing any more; an optimizer over it can only be dropped.
            with suppress(Exception):
                optimizer.close()
            if fake.error is not None:
                raise fake.error from None  # whatever came of it in another thread
            raise
        finally:
            for hook in hooks:
                hook.remove()
        optimizer.close()
