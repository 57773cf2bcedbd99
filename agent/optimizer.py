"""`tidegate.AdamW`: a `torch.optim.Optimizer` whose state lives outside the device and whose update is a plan."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, Self

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tidegate.agent import checkpoint
from tidegate.agent.devices.base import Device
from tidegate.agent.devices.emulated import EmulatedDevice, EmulatedRates
from tidegate.agent.engine.engine import Effective, Engine, StepResult
from tidegate.agent.engine.runner import StepInputs
from tidegate.agent.interrupts import Uninterrupted
from tidegate.agent.subgroups import check_param, cut
from tidegate.agent.telemetry.phases import PhaseClock, StepPhases
from tidegate.errors import ConfigError, MemoryBudgetError, ParameterError
from tidegate.kernels import Scalars, scalars
from tidegate.kernels.oracle import clip_scale
from tidegate.knobs import AUTO, Knobs, KnobValue
from tidegate.plan import Policy

START_STRIDE = 2.0
"""What `auto` begins with, before rates are measured: the papers' choice."""


class Closeable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where and how state is offloaded.

    stride: every stride-th subgroup that is not resident is updated on the device; "off", or "auto": 2 at first, then
        what measured rates call for, once attached.
    static_ratio: share of the subgroups whose state stays on the device.
    subgroup_numel: parameters per subgroup.
    num_slots: staging slots on the device; two or more let copies in, updates and copies out overlap.
    cpu_threads: threads of the CPU lane; 0 for one less than there are cores, at least one.
    device: "auto" takes the emulated device where there is no GPU; "emulated" always.
    device_memory_bytes: capacity of the emulated device; 0 for four times what the weights take, plus the state.
    emulated: rates of the emulated lanes.
    headroom_bytes: device memory that state must leave free.
    policy: "interleaved", or a baseline: "sequential", "twinflow".
    """

    stride: float | str = AUTO
    static_ratio: float = 0.0
    subgroup_numel: int = 100_000_000
    num_slots: int = 2
    cpu_threads: int = 0
    device: str = "auto"
    device_memory_bytes: int = 0
    emulated: EmulatedRates = field(default_factory=EmulatedRates)
    headroom_bytes: int = 0
    policy: Policy = "interleaved"
    watchdog_seconds: float = 120.0

    def __post_init__(self) -> None:
        self.knobs()
        for name, minimum in (("subgroup_numel", 1), ("num_slots", 1), ("cpu_threads", 0), ("headroom_bytes", 0)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: at least {minimum}.")
        if self.device not in ("auto", "emulated"):
            raise ConfigError(f"device={self.device!r} is unknown: 'auto' or 'emulated'.")

    def knobs(self) -> Knobs:
        return Knobs(stride=self.stride, static_ratio=self.static_ratio)  # type: ignore[arg-type]


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter → weak reference to the optimizer that holds it."""


class AdamW(torch.optim.Optimizer):
    """AdamW with offloaded state; for given gradients its weights equal the oracle's bit for bit.

    params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
    decoupled: False gives Adam, with weight decay as an L2 term.
    max_grad_norm: clips the norm of all gradients to this; None leaves them.
    offload: see `Offload`.

    Raises ParameterError for no, sparse, shared or unsupported parameters. Use it as a context manager, or `close()`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        max_grad_norm: float | None = None,
        offload: Offload | None = None,
    ) -> None:
        _check_hyperparameters(lr, betas, eps, weight_decay, max_grad_norm)
        params = list(params)
        if not params:
            raise ParameterError("The optimizer got no parameters: pass model.parameters().")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.offload = offload or Offload()
        self.max_grad_norm = max_grad_norm
        self._decoupled = decoupled
        self._params: list[torch.nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        self._steps = [0] * len(self._params)
        self._pid = os.getpid()
        self._claim()
        self.device = _device(self.offload, self._params)
        layouts = cut([group["params"] for group in self.param_groups], self.offload.subgroup_numel)
        self.engine = Engine(
            self._params,
            layouts,
            self.device,
            num_slots=self.offload.num_slots,
            cpu_threads=self.offload.cpu_threads or max(1, (os.cpu_count() or 2) - 1),
            policy=self.offload.policy,
            early_gradients=not _is_distributed(),
            watchdog_seconds=self.offload.watchdog_seconds,
        )
        self.knobs = self.offload.knobs()
        self.phases = PhaseClock(self.device.take_peak_bytes)
        self.observers: list[Callable[[StepResult, StepPhases], None]] = []
        """Called in the training thread after each step."""
        self.logged: dict[str, float] = {}
        self.attachment: Closeable | None = None
        self._backward_id = -1
        self._auto_stride: float | str = START_STRIDE
        try:
            self.check_knobs(self.knobs)
        except BaseException:
            self.close()
            raise
        self.apply_knobs(self.knobs)
        self.engine.watch(self._on_gradient)

    # ---- training

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. `closure` re-evaluates the model and returns the loss, as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not any(p.grad is not None for p in self._params):
            return loss
        self.phases.enter("update")
        with Uninterrupted():
            with self.phases.exposed():
                result = self.engine.step(self._inputs())
            for param in result.stepped:
                self._steps[param] += 1
            self.phases.enter("other")
            phases = self.phases.cut()
            for observe in tuple(self.observers):
                observe(result, phases)
        return loss

    def log(self, *, loss: float | None = None, tokens: int | None = None) -> None:
        """Tells the metrics what training makes: the loss of this step, the tokens it took."""
        if loss is not None:
            self.logged["loss"] = float(loss)
        if tokens is not None:
            self.logged["tokens"] = self.logged.get("tokens", 0) + int(tokens)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.quiesce()
        super().zero_grad(set_to_none)
        self.engine.gradients.forget()

    def backward_began(self, *_: Any) -> None:
        """A backward pass is under way, in the phase of that name until it ends. To be called by hooks inside it."""
        self.phases.enter("backward")
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if self.phases.current == "backward":
            self.phases.enter("other")

    def _on_gradient(self, param: int) -> None:
        self.backward_began()
        with self.phases.exposed():
            self.engine.gradient_accumulated(param)

    def _inputs(self) -> StepInputs:
        groups = [dict(group) for group in self.param_groups]
        known: dict[tuple[int, int, float], Scalars] = {}

        def of(group: int, step: int, grad_scale: float) -> Scalars:
            key = (group, step, grad_scale)
            if key not in known:
                values = groups[group]
                known[key] = scalars(
                    lr=float(values["lr"]), beta1=float(values["betas"][0]), beta2=float(values["betas"][1]),
                    eps=float(values["eps"]), weight_decay=float(values["weight_decay"]), step=step,
                    decoupled=self._decoupled, grad_scale=grad_scale,
                )  # fmt: skip
            return known[key]

        return StepInputs(steps=[step + 1 for step in self._steps], scalars=of, clip=self._clip)

    def _clip(self, norm: float) -> float:
        return 1.0 if self.max_grad_norm is None else float(clip_scale(norm, self.max_grad_norm))

    # ---- knobs

    def check_knobs(self, knobs: Knobs) -> None:
        """MemoryBudgetError with figures when these knobs do not fit. Safe from any thread."""
        self.engine.check(self._effective(knobs), self.offload.headroom_bytes)

    def apply_knobs(self, knobs: Knobs) -> None:
        """These knobs from the next step on. Between steps only."""
        self.knobs = knobs
        self.engine.effective = self._effective(knobs)

    def set_auto_stride(self, stride: float | str) -> None:
        """What `auto` stands for from the next step on; MemoryBudgetError, with nothing changed, if it does not fit."""
        before, self._auto_stride = self._auto_stride, stride
        try:
            self.check_knobs(self.knobs)
        except MemoryBudgetError:
            self._auto_stride = before
            raise
        self.apply_knobs(self.knobs)

    def effective_knobs(self) -> dict[str, KnobValue]:
        return {"stride": self.engine.effective.stride, "static_ratio": self.engine.effective.static_ratio}

    def _effective(self, knobs: Knobs) -> Effective:
        stride = self._auto_stride if knobs.stride == AUTO else knobs.stride
        if self.offload.policy == "twinflow":
            stride = "off"
        return Effective(stride, knobs.static_ratio)  # type: ignore[arg-type]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW`'s: step, exp_avg, exp_avg_sq of each parameter that was updated."""
        self.engine.require_usable()
        self.engine.quiesce()
        packed = super().state_dict()
        with self.phases.within("checkpoint"):
            self.engine.take_edited_weights()
            packed["state"] = checkpoint.gather(self.engine, self._params, self._steps)
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state of ours or of `torch.optim.AdamW`. Weights are taken as they are: load them first.

        ConfigError, with nothing changed, when the state is of another model or another rule.
        """
        checkpoint.check(state_dict, self._params)
        self.engine.quiesce()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        with self.phases.within("checkpoint"):
            state = state_dict["state"]
            checkpoint.scatter(self.engine, self._params, state)
            self._steps = [int(state[i]["step"]) if i in state else 0 for i in range(len(self._params))]

    # ---- life

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "engine"):
            raise ParameterError("Parameters cannot be added to a running optimizer yet: build it with all of them.")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Stops lanes and telemetry and releases the parameters. The weights stay. Idempotent; nothing in a fork."""
        if os.getpid() != self._pid:
            return
        if self.attachment is not None:
            self.attachment.close()
        self.engine.close()
        for param in self._params:
            owner = _owners.get(param)
            if owner is not None and owner() is self:
                del _owners[param]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "A Tidegate optimizer owns threads and buffers and cannot be copied or pickled; use state_dict()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__getstate__()

    def _claim(self) -> None:
        for index, param in enumerate(self._params):
            check_param(param, index)
            owner = _owners.get(param)
            if owner is not None and owner() is not None:
                raise ParameterError(
                    f"Parameter {index} (shape {tuple(param.shape)}) already belongs to another Tidegate optimizer; "
                    "close() that one first."
                )
        for param in self._params:
            _owners[param] = weakref.ref(self)


def _check_hyperparameters(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float | None
) -> None:
    if not lr >= 0.0:
        raise ConfigError(f"lr={lr} is out of range: at least 0.")
    if not eps >= 0.0:
        raise ConfigError(f"eps={eps} is out of range: at least 0.")
    if not weight_decay >= 0.0:
        raise ConfigError(f"weight_decay={weight_decay} is out of range: at least 0.")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"betas[{i}]={beta} is out of range: from 0 to below 1.")
    if max_grad_norm is not None and not max_grad_norm > 0.0:
        raise ConfigError(f"max_grad_norm={max_grad_norm} is out of range: above 0, or None.")


def _device(offload: Offload, params: list[torch.nn.Parameter]) -> Device:
    kinds = {param.device.type for param in params}
    if kinds != {"cpu"}:
        raise ParameterError(
            f"Parameters are on {', '.join(sorted(kinds))}; this release runs on the emulated device, "
            "whose weights are CPU tensors."
        )
    weights = sum(p.numel() * p.element_size() for p in params)
    numel = sum(p.numel() for p in params)
    return EmulatedDevice(offload.device_memory_bytes or 4 * weights + 12 * numel + (1 << 20), offload.emulated)


def _is_distributed() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
