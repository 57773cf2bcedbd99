"""Host buffers of subgroups: one for each subgroup, reused from step to step, or one for the gradients of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import torch

from tidegate.plan.deferral import gradient_memory
from tidegate.plan.gradient_memory import GradientMemory
from tidegate.plan.plan import Plan


class HostBuffers(dict[int, torch.Tensor]):
    """Host buffers of one kind (state, weight mirror or gradient) by subgroup id. `new(nbytes)` allocates a buffer of
    zeros.

    With the knob `order=alternate`, the set of subgroups in host memory changes in each step. Allocating new pages for
    them would take longer than reading the state into the pages. So a released buffer is kept until the end of the next
    step, and is freed then if no subgroup has reused it.

    Only the methods of this class may change the buffers, because `nbytes` counts their changes: no `update` or
    `setdefault`.
    """

    def __init__(self, new: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._new = new
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        """Released buffers that are not freed yet, by size in bytes."""
        self._changes = 0
        """Number of changes of the buffers."""
        self._counted = (0, 0)
        """Number of changes when the bytes were last summed, and that sum. It is valid until the next change."""

    @property
    def nbytes(self) -> int:
        """Total bytes of all buffers, including released buffers that are not freed yet. May be called from any thread,
        also while another thread allocates and releases buffers."""
        changes, (counted_at, nbytes) = self._changes, self._counted
        if changes != counted_at:
            spare = sum(size * len(buffers) for size, buffers in self._spare.copy().items())
            nbytes = sum(buffer.numel() for buffer in self.copy().values()) + spare
            self._counted = changes, nbytes
        return nbytes

    def __setitem__(self, subgroup: int, buffer: torch.Tensor) -> None:
        super().__setitem__(subgroup, buffer)
        self._changes += 1

    def __delitem__(self, subgroup: int) -> None:
        super().__delitem__(subgroup)
        self._changes += 1

    def pop(self, subgroup: int, /, *default: Any) -> Any:
        """As `dict.pop`: removes the subgroup's buffer and returns it. Without a buffer, returns `default`; without
        `default`, raises KeyError."""
        held = len(self)
        buffer = super().pop(subgroup, *default)
        self._changes += held != len(self)
        return buffer

    def allocate(self, subgroup: int, nbytes: int) -> None:
        """Gives the subgroup a buffer with undefined content: a released buffer of this size if there is one, else a
        new one."""
        spare = self._spare.get(nbytes)
        self[subgroup] = spare.pop() if spare else self._new(nbytes)

    def allocate_zeros(self, subgroup: int, nbytes: int) -> None:
        """Gives the subgroup a new buffer of zeros."""
        self[subgroup] = self._new(nbytes)

    def release(self, subgroup: int) -> None:
        """Releases the subgroup's buffer; does nothing if it has none."""
        buffer = super().pop(subgroup, None)
        if buffer is not None:
            self._spare[buffer.numel()].append(buffer)
            self._changes += 1

    def free_released(self) -> None:
        """Frees the buffers that were released and not reused."""
        if self._spare:
            self._spare.clear()
            self._changes += 1

    def clear(self) -> None:
        super().clear()
        self._spare.clear()
        self._changes += 1


class GradientBuffer:
    """One host buffer for the gradients of all subgroups, in which deferred slots take the memory of used gradients.
    `new(nbytes)` allocates a buffer.

    Its content is needed only while a plan is in flight, so that each plan may have another layout.
    """

    KINDS: Final = frozenset({"host_grad", "deferred_slot", "deferred_weight"})
    """The kinds of places that are in this buffer (`BufferId`)."""

    def __init__(self, new: Callable[[int], torch.Tensor]) -> None:
        self._new = new
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._plan: Plan | None = None
        self._layout = GradientMemory(())

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def resize(self, nbytes: int) -> None:
        """Allocates another buffer if the present one is too small, or more than twice as large: spilled gradients may
        be others in each step, and the size must not follow each of them."""
        if not nbytes <= self.nbytes <= 2 * nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before the next one is allocated
            if nbytes:
                self._buffer = self._new(nbytes)

    def lay_out(self, plan: Plan) -> None:
        """Sets where gradients and deferred slots are during this plan, and resizes the buffer for them."""
        if plan is not self._plan:
            self._plan = plan
            subgroups, placements = plan.subgroups, plan.placements
            self._layout = plan.gradient_memory or gradient_memory(subgroups, placements, range(len(subgroups)))
        self.resize(self._layout.nbytes)

    def address(self, kind: str, number: int) -> int:
        """The address of a gradient (`host_grad`), by id of its subgroup, or of a deferred slot, by its number."""
        if kind == "host_grad":
            offset = self._layout.offsets[number]
        else:
            offset = (self._layout.slots if kind == "deferred_slot" else self._layout.weight_slots)[number].offset
        return self._buffer.data_ptr() + offset
