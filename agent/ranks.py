"""This process among the ranks of a training: for what all of them must do, or know, alike."""

from __future__ import annotations

from collections.abc import Sequence
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

    def of_all(self, mine: T) -> list[T]:
        """What every rank says, in their order."""
        if self.count == 1:
            return [mine]
        said: list[T] = [mine] * self.count
        torch.distributed.all_gather_object(said, mine)
        return said

    def least(self, mine: Sequence[float]) -> list[float]:
        """Of each number the least of all ranks, by one small all-reduce. Numbers are doubles."""
        if self.count == 1:
            return list(mine)
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        numbers = torch.tensor(mine, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN)
        return numbers.tolist()

    def all_true(self, mine: bool) -> bool:
        """Whether it is so on every rank; all wait for the last one."""
        return all(self.of_all(mine))
