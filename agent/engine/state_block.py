"""The block of memory that holds the state of one subgroup: its arrays, their addresses, and its size."""

from __future__ import annotations

import torch

from tidegate.agent.parameters.subgroups import Format, Layout
from tidegate.plan.slot_sizes import whole_pages


def state_addresses(layout: Layout, block: int, first: int) -> tuple[tuple[int, ...], int]:
    """The addresses of element `first` in the arrays of the block of state that begins at address `block`: those of the
    rule's tensors, in the rule's order, and that of aux (remainder or fp32 master), which is 0 when the format has
    none."""
    form, n = layout.format, layout.numel
    addresses = tuple([block + offset * n + nbytes * first for offset, nbytes in form.places])
    count = len(form.rule.tensors)
    return addresses[:count], addresses[count] if form.aux_bytes else 0


def state_arrays(block: torch.Tensor, numel: int, form: Format) -> dict[str, torch.Tensor]:
    """The arrays in one block of state by name: the state tensors of the rule and, for 16-bit weights, `remainder` or
    `master`. Each is a view of `block`, a tensor of bytes, and has `numel` elements."""
    return {
        array.name: block[offset * numel : (offset + nbytes) * numel].view(getattr(torch, array.dtype))
        for array, (offset, nbytes) in zip(form.arrays, form.places, strict=True)
    }


def state_buffer_bytes(layout: Layout) -> int:
    """Bytes of the subgroup's state buffer in host memory, in whole pages."""
    return whole_pages(layout.numel * layout.format.state_bytes)
