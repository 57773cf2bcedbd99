"""Converts this rank's state from and to DeepSpeed's layout: fp32 weights and moments of each DeepSpeed subgroup as
flat tensors. A part is this rank's partition of one parameter."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.engine.engine import Engine
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.parameters.subgroups import Segment, flat
from tidegate.agent.ranks import Ranks
from tidegate.errors import ConfigError, MemoryBudgetError
from tidegate.rules.adamw import RULE as AdamW

MOMENTS = tuple(tensor.name for tensor in AdamW.tensors)
BYTES_PER_PARAM = 4 + AdamW.bytes_per_param
"""Bytes of fp32 weight and moments together."""


@dataclass(frozen=True, slots=True)
class FlatPosition:
    """Where a part (this rank's partition of one parameter) is in DeepSpeed's layout: number of the DeepSpeed subgroup,
    and offset and number of the part's elements in it."""

    subgroup: int
    offset: int
    numel: int


@dataclass(frozen=True)
class FlatState:
    """State of one DeepSpeed subgroup in host memory, as flat tensors. `master`: fp32 weights. `moments`: exp_avg and
    exp_avg_sq by name; empty before the first step."""

    master: torch.Tensor
    moments: Mapping[str, torch.Tensor]


def split_bf16(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits fp32 values into bf16 values (nearest, ties away from zero) and 16-bit remainders, from which fp32 can be
    restored. It is `split_bf16` of the NumPy reference (`kernels.arithmetic.oracle`), written in torch."""
    bits = master.view(torch.int32)
    nan = master.isnan()
    high = torch.where(nan, bits >> 16 | 0x40, (bits + 0x8000) >> 16)
    low = torch.where(nan, 0, bits - (high << 16))
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_bf16(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Restores the fp32 values from bf16 values and remainders: the inverse of `split_bf16`."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def require_host_memory(numel: int, ranks: Ranks) -> None:
    """Raises MemoryBudgetError, on all ranks, when the fp32 weights and moments of all ranks of a host do not fit in
    the host's available memory. `numel`: number of parameters of this rank. A collective of all ranks."""
    host = socket.gethostname()
    demands = ranks.all_gather((host, numel * BYTES_PER_PARAM, host_available_bytes()))
    for one in dict.fromkeys(where for where, _, _ in demands):
        needed = sum(nbytes for where, nbytes, _ in demands if where == one)
        available = min(nbytes for where, _, nbytes in demands if where == one)
        if needed > available:
            raise MemoryBudgetError(
                f"DeepSpeed's checkpoints hold the whole state of a host's ranks: {needed:,} bytes of host memory are "
                f"needed for it on {one}, {available:,} are available. Lower host_cache, or use more hosts.",
                needed, available,
            )  # fmt: skip


def check_sizes(saved: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises ConfigError if a checkpoint's subgroups have other sizes than this run's: DeepSpeed had swapped the state
    to its own files, or the checkpoint is of another model, number of ranks or `sub_group_size`. `saved`: number of
    elements of each DeepSpeed subgroup on this rank in the checkpoint. `wanted`: the same for this run."""
    if list(saved) != list(wanted):
        elsewhere = len(saved) == len(wanted) and 0 in saved
        raise ConfigError(
            "The checkpoint's state was swapped to NVMe by DeepSpeed itself, and its files are in DeepSpeed's own "
            'format. Load it with offload_optimizer.device "nvme" without Tidegate, and save weights from there.'
            if elsewhere
            else f"The checkpoint has subgroups of {saved} elements on this rank, but this run has subgroups of "
            f"{wanted}: the checkpoint was saved with another model, number of ranks or sub_group_size. Resume with "
            "the same ones."
        )


def idle_engine(optimizer: Optimizer) -> Engine:
    """Waits until no update is running and returns the optimizer's engine. If the user has changed weights of the
    model, their fp32 weights in the state are set to the changed values first."""
    optimizer.wait()
    engine = optimizer.engine
    engine.usability.require()
    engine.drop_plan()
    engine.weights.adapt_to_edits()
    return engine


def read_all(optimizer: Optimizer, positions: Sequence[FlatPosition], flats: Sequence[FlatState]) -> None:
    """Copies the optimizer's state into `flats`, one for each DeepSpeed subgroup. `positions`: for each part (this
    rank's partition of one parameter), its place in `flats`."""
    engine = idle_engine(optimizer)
    for layout in engine.layouts:
        with engine.memory.arrays(layout.id, changed=False) as arrays:
            for s in layout.segments:
                position = positions[s.param]
                where = slice(position.offset + s.offset, position.offset + s.offset + s.numel)
                into = flats[position.subgroup]
                into.master[where] = _master(arrays, s, engine.shards[s.param])
                for name, moment in into.moments.items():
                    moment[where] = arrays[name][s.start : s.start + s.numel]


def write_all(
    optimizer: Optimizer, positions: Sequence[FlatPosition], flats: Sequence[FlatState], steps: Sequence[int]
) -> None:
    """Loads fp32 weights and moments from `flats`, one for each DeepSpeed subgroup, into the optimizer, and sets the
    model's weights to the rounded fp32 weights. `positions`: for each part (this rank's partition of one parameter),
    its place in `flats`. `steps`: number of updates of each DeepSpeed subgroup."""
    optimizer.wait()
    state: dict[int, dict[str, torch.Tensor]] = {}
    for i, (position, part) in enumerate(zip(positions, optimizer.engine.shards, strict=True)):
        where, found = slice(position.offset, position.offset + position.numel), flats[position.subgroup]
        own = _set_weight(part, found.master[where])
        nothing = torch.zeros(1, device="cpu").expand(position.numel)
        own |= {name: found.moments[name][where] if name in found.moments else nothing for name in MOMENTS}
        state[i] = own | {"step": torch.tensor(float(steps[position.subgroup]), device="cpu")}
    numbers = iter(range(len(positions)))
    groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def read_part(optimizer: Optimizer, part: int, name: str | None) -> torch.Tensor:
    """Copies one array of the state to a new fp32 tensor in host memory. `part`: number of a part (this rank's
    partition of one parameter). `name`: name of a moment; None for the fp32 weights."""
    engine = idle_engine(optimizer)
    found = torch.empty(engine.shards[part].numel(), dtype=torch.float32, device="cpu")
    for layout in engine.gradients.subgroups_of(part):
        with engine.memory.arrays(layout.id, changed=False) as arrays:
            for s in layout.segments:
                if s.param == part:
                    whole = engine.shards[part]
                    values = _master(arrays, s, whole) if name is None else _array(arrays, _checked_name(name), s)
                    found[s.offset : s.offset + s.numel] = values
    return found


def write_part(optimizer: Optimizer, part: int, name: str | None, values: torch.Tensor) -> None:
    """Sets one array of the state to `values`. `part`: number of a part (this rank's partition of one parameter).
    `name`: name of a moment; None for the fp32 weights. If fp32 weights are set, the model's weights are set to the
    rounded values, too."""
    engine = idle_engine(optimizer)
    if name is None:
        own = _set_weight(engine.shards[part], values)
        engine.weights.adapt_to_edits()
    else:
        own = {_checked_name(name): values}
    for layout in engine.gradients.subgroups_of(part) if own else ():
        with engine.memory.arrays(layout.id) as arrays:
            for s in layout.segments:
                for key, given in own.items() if s.param == part else ():
                    _array(arrays, key, s).copy_(given[s.offset : s.offset + s.numel])


def _checked_name(name: str) -> str:
    """Returns the name of a moment unchanged. ConfigError for any other name."""
    if name not in MOMENTS:
        raise ConfigError(f"The optimizer has no state {name!r}: use one of {', '.join(MOMENTS)}.")
    return name


def _array(arrays: Mapping[str, torch.Tensor], name: str, s: Segment) -> torch.Tensor:
    """The range of the state array `name` that belongs to a segment (the part of one parameter in one subgroup)."""
    return arrays[name][s.start : s.start + s.numel]


def _master(arrays: Mapping[str, torch.Tensor], s: Segment, part: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 weights of a segment `s` (the part of one parameter in one subgroup). `arrays`: state of the
    subgroup, by name. `part`: the weights of this rank's partition of the parameter."""
    if "master" in arrays:
        return _array(arrays, "master", s)
    weight = flat(part)[s.offset : s.offset + s.numel].cpu()
    return join_bf16(weight, _array(arrays, "remainder", s)) if "remainder" in arrays else weight


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts fp32 weights to `dtype` as the engine does: bf16 is rounded to nearest, ties away from zero."""
    return split_bf16(master.float().contiguous())[0] if dtype == torch.bfloat16 else master.to(dtype)


@torch.no_grad()
def _set_weight(part: torch.Tensor, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rounds the fp32 weights `master` to the dtype of `part` (this rank's partition of one parameter), and writes them
    into it. Returns, by name, what completes the weights to fp32: the remainder (bf16), the master (fp16), or nothing
    (fp32)."""
    if part.dtype == torch.bfloat16:
        weight, remainder = split_bf16(master.contiguous())
        part.copy_(weight)
        return {"remainder": remainder}
    part.copy_(master)
    return {"master": master} if part.dtype == torch.float16 else {}
