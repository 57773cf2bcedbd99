"""The trainings (sides) that are compared. Each is a function that makes a `Training` with `forward`, `backward` and
`update`.

Each side runs in its own process (`bench.gpu.iteration`), because it may change global settings or run out of memory.
All sides have the same model shape, weights from the same seed, and the same tokens.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import tidegate
from bench.gpu.shapes import GIB, Shape
from bench.gpu.target import FAST

LR = 1e-4


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Description of a training. threads: threads of the CPU update; 0 for the default of the side."""

    side: str
    shape: Shape
    dry: bool
    microbatch: int = 1
    threads: int = 0
    static_ratio: float = 0.0
    stride: float | str = "auto"
    paths: dict[str, str] = field(default_factory=dict)
    host_cache: int | str = "auto"
    results: str = ""
    """Folder of the stages' results, with the calibration if it was measured."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        # Backward passes in bf16 take for ever on CPUs that know none.
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def num_subgroups(self) -> int:
        return 8 if self.dry else 0


@dataclass
class Training:
    """A training of one side: the functions of an iteration, and its model.

    peak_device_bytes: function that returns the peak of GPU memory in bytes; None to use torch's own counter. Tidegate
    needs its own function, because the engine resets torch's counter. notes: further entries of the result, by
    name: values, or functions that return them.
    """

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], object]
    update: Callable[[], object]
    model: torch.nn.Module
    close: Callable[[], object] = lambda: None
    peak_device_bytes: Callable[[], int] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    attachment: Any = None
    """What `tidegate.attach` returned: the handle of the telemetry. None for sides other than Tidegate."""

    def iteration(self) -> None:
        self.backward(self.forward())
        self.update()


def build(ask: Ask) -> Training:
    """Builds the training. Raises errors of the side, such as ImportError if its package is not installed."""
    sides: dict[str, Callable[[Ask, torch.Tensor], Training]] = {
        "tidegate": _tidegate,
        "tidegate_overlap": lambda ask, tokens: _tidegate(ask, tokens, overlap=True),
        "all_cpu": lambda ask, tokens: _tidegate(ask, tokens, stride="off"),
        "resident": lambda ask, tokens: _tidegate(ask, tokens, static_ratio=1.0),
        "zero3_cpu": _deepspeed,
        "twinflow": lambda ask, tokens: _deepspeed(ask, tokens, ratio=1.0 - ask.static_ratio),
        "superoffload": lambda ask, tokens: _deepspeed(ask, tokens, super_offload=True),
        "torchao": _torchao,
    }
    generator = torch.Generator().manual_seed(1)
    shape = (ask.microbatch, ask.shape.sequence)
    tokens = torch.randint(ask.shape.vocabulary, shape, generator=generator).to(ask.device)
    return sides[ask.side](ask, tokens)


def _loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


def _tidegate(
    ask: Ask, tokens: torch.Tensor, *, stride: float | str | None = None, static_ratio: float | None = None,
    overlap: bool = False,
) -> Training:  # fmt: skip
    model = ask.shape.build(ask.device, ask.dtype)
    numel = sum(p.numel() for p in model.parameters())
    offload = tidegate.Offload(
        stride=ask.stride if stride is None else stride,
        static_ratio=ask.static_ratio if static_ratio is None else static_ratio,
        subgroup_numel=max(1, numel // ask.num_subgroups) if ask.num_subgroups else 100_000_000,
        cpu_threads=ask.threads,
        gradients="release",
        emulated=FAST,
        paths=dict(ask.paths),
        **({"host_cache": ask.host_cache} if ask.paths else {}),
    )
    optimizer = tidegate.AdamW(model.parameters(), lr=LR, offload=offload)
    attachment = tidegate.attach(optimizer, model, run=f"bench-{ask.side}")
    overlapping = tidegate.overlap_forward(optimizer, model) if overlap else None
    peak = 0

    def observe(_: object, phases: Any) -> None:
        nonlocal peak
        peak = max([peak, *phases.device_peak_bytes.values()])

    optimizer.observers.append(observe)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def close() -> None:
        attachment.close()
        if overlapping is not None:
            overlapping.close()
        optimizer.close()

    return Training(
        forward=lambda: _loss(model, tokens),
        backward=lambda loss: loss.backward(),  # type: ignore[no-untyped-call]
        update=update,
        model=model,
        close=close,
        peak_device_bytes=lambda: peak,
        notes={"knobs": optimizer.effective_knobs},
        optimizer=optimizer,
        attachment=attachment,
    )


def _deepspeed(ask: Ask, tokens: torch.Tensor, ratio: float = 1.0, super_offload: bool = False) -> Training:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(_free_port())
    if ask.threads:
        os.environ["OMP_NUM_THREADS"] = str(ask.threads)
        torch.set_num_threads(ask.threads)
    import deepspeed

    model = ask.shape.build(ask.device, ask.dtype)
    where: dict[str, Any] = {"device": "cpu", "pin_memory": not ask.dry, "ratio": ratio}
    if super_offload:
        where["super_offload"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ask.microbatch,
        "bf16": {"enabled": ask.dtype is torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 100_000_000, "overlap_comm": True, "contiguous_gradients": True,
            "offload_optimizer": where,
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Training(
        forward=lambda: _loss(engine, tokens),
        backward=engine.backward,
        update=engine.step,
        model=model,
        notes={"deepspeed": deepspeed.__version__, "offload_optimizer": where},
    )


def _torchao(ask: Ask, tokens: torch.Tensor) -> Training:
    import torchao
    from torchao.optim import CPUOffloadOptimizer

    model = ask.shape.build(ask.device, ask.dtype)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=LR)
    return Training(
        forward=lambda: _loss(model, tokens),
        backward=lambda loss: loss.backward(),  # type: ignore[no-untyped-call]
        update=lambda: (optimizer.step(), optimizer.zero_grad()),
        model=model,
        notes={"torchao": torchao.__version__, "state": "in the weights' dtype: less than the others keep"},
    )


def cap_memory(ask: Ask) -> int | None:
    """Limits torch to the GPU memory of the shape, and returns the limit in bytes; None, without a limit, for the side
    that keeps all state on the GPU and for --dry."""
    if ask.dry or ask.side == "resident":
        return None
    limit = ask.shape.device_gib * GIB
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    return min(limit, total)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
