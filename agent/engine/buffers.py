"""Host memory of subgroups, buffer by buffer. What one step lets go serves the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch


class Buffers(dict[int, torch.Tensor]):
    """Of one kind, by subgroup; `new(nbytes)` gives zeros.

    Where orders alternate, subgroups take turns in host memory: new pages in each step would cost more than the fetch
    into them. What a step lets go is kept until the next has ended, and is freed unless that one took it.
    """

    def __init__(self, new: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._new = new
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        """By size, in bytes."""

    @property
    def nbytes(self) -> int:
        """With those that were let go. From any thread: others may take and let go meanwhile."""
        spare = sum(size * len(found) for size, found in self._spare.copy().items())
        return sum(buffer.numel() for buffer in self.copy().values()) + spare

    def take(self, subgroup: int, nbytes: int) -> None:
        """A buffer with anything in it, for what is about to be filled."""
        spare = self._spare.get(nbytes)
        self[subgroup] = spare.pop() if spare else self._new(nbytes)

    def make(self, subgroup: int, nbytes: int) -> None:
        """A buffer of zeros."""
        self[subgroup] = self._new(nbytes)

    def let_go(self, subgroup: int) -> None:
        """Nothing happens where it has none."""
        buffer = self.pop(subgroup, None)
        if buffer is not None:
            self._spare[buffer.numel()].append(buffer)

    def forget(self) -> None:
        """Frees what was let go."""
        self._spare.clear()

    def clear(self) -> None:
        super().clear()
        self.forget()
