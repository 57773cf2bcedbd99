"""This process among the ranks of a training: for what all of them must do, or know, alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of `count`. The collectives are for all ranks to call, in the same order."""

    rank: int = 0
    count: int = 1

    @classmethod
    def now(cls) -> Self:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())

    def from_first(self, mine: T) -> T:
        """What rank 0 says, for all."""
        if self.count == 1:
            return mine
        said = [mine]
        torch.distributed.broadcast_object_list(said, src=0)
        return said[0]

    def all_true(self, mine: bool) -> bool:
        """Whether it is so on every rank; all wait for the last one."""
        if self.count == 1:
            return mine
        said: list[bool] = [False] * self.count
        torch.distributed.all_gather_object(said, mine)
        return all(said)
