"""The block of memory that holds the state of one subgroup: its arrays, their addresses, and its size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.agent.parameters.subgroups import Layout
from tidegate.kernels import WeightFormat
from tidegate.plan.slot_sizes import whole_pages


@dataclass(frozen=True, slots=True)
class StateAddresses:
    """Addresses of the arrays in one block of state: both moments (`exp_avg`, `exp_avg_sq`) and `aux`, the remainder or
    the fp32 master. `aux` is 0 if the format of the weights needs neither."""

    exp_avg: int
    exp_avg_sq: int
    aux: int


def state_addresses(layout: Layout, block: int) -> StateAddresses:
    """The addresses of the arrays in the block of state that begins at address `block`."""
    n = layout.numel
    return StateAddresses(block, block + 4 * n, block + 8 * n if layout.format.aux_bytes else 0)


def state_arrays(block: torch.Tensor, numel: int, weight: WeightFormat) -> dict[str, torch.Tensor]:
    """The arrays in one block of state by name: `exp_avg`, `exp_avg_sq` and, for 16-bit weights, `remainder` or
    `master`. Each is a view of `block`, a tensor of bytes, and has `numel` elements."""
    n = numel
    arrays = {"exp_avg": block[: 4 * n].view(torch.float32), "exp_avg_sq": block[4 * n : 8 * n].view(torch.float32)}
    if weight == WeightFormat.BF16_REMAINDER:
        arrays["remainder"] = block[8 * n : 10 * n].view(torch.int16)
    elif weight.aux_bytes:
        arrays["master"] = block[8 * n : 12 * n].view(torch.float32)
    return arrays


def state_buffer_bytes(layout: Layout) -> int:
    """Bytes of the subgroup's state buffer in host memory, in whole pages."""
    return whole_pages(layout.numel * layout.format.state_bytes)
