"""Host buffers of subgroups. Buffers that one step releases are reused by the next step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch


class HostBuffers(dict[int, torch.Tensor]):
    """Host buffers of one kind (state, weight mirror or gradient) by subgroup id. `new(nbytes)` allocates a buffer of
    zeros.

    With the knob `order=alternate`, the set of subgroups in host memory changes in each step. Allocating new pages for
    them would take longer than reading the state into the pages. So a released buffer is kept until the end of the next
    step, and is freed then if no subgroup has reused it.
    """

    def __init__(self, new: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._new = new
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        """Released buffers that are not freed yet, by size in bytes."""

    @property
    def nbytes(self) -> int:
        """Total bytes of all buffers, including released buffers that are not freed yet. May be called from any thread,
        also while another thread allocates and releases buffers."""
        spare = sum(size * len(buffers) for size, buffers in self._spare.copy().items())
        return sum(buffer.numel() for buffer in self.copy().values()) + spare

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
        buffer = self.pop(subgroup, None)
        if buffer is not None:
            self._spare[buffer.numel()].append(buffer)

    def free_released(self) -> None:
        """Frees the buffers that were released and not reused."""
        self._spare.clear()

    def clear(self) -> None:
        super().clear()
        self.free_released()
