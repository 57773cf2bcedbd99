"""This process among the ranks of a training: for what all of them must do, or know, alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar

import torch

from tidegate.errors import ConfigError

T = TypeVar("T")

_RANKS_HERE: Final = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""As torchrun, deepspeed and mpirun call the number of ranks of this host."""


def local_rank() -> int:
    """This process among those of its host, 0 without a launcher. ConfigError as `_told_by_launcher`."""
    return _told_by_launcher("LOCAL_RANK", 0)


def ranks_of_host() -> int:
    """How many ranks the launcher started on this host, at least one; 1 without a launcher.

    The first of `_RANKS_HERE` that is set, else srun's SLURM_NTASKS_PER_NODE where that is one number for all hosts.
    ConfigError as `_told_by_launcher`.
    """
    for name in _RANKS_HERE:
        if name in os.environ:
            return max(1, _told_by_launcher(name, 1))
    of_slurm = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return max(1, int(of_slurm)) if of_slurm.isdecimal() else 1


def cpu_lane_threads() -> int:
    """How many threads the CPU lane of this rank may use, at least one: the cores that the process is bound to, without
    one for each training thread that runs on them.

    The cores of a host are not divided between its ranks. Threads without work sleep, so that a rank which waits for a
    path or for its device leaves them to the others; when all compute, the kernel shares them out. Ranks which a
    launcher bound to cores of their own keep to these.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, cores - (ranks_of_host() if cores == os.cpu_count() else 1))


def ranks_that_share_host() -> int:
    """Those of this training that share the host's memory; a process that trains alone has it to itself."""
    return ranks_of_host() if Ranks.now().count > 1 else 1


def _told_by_launcher(name: str, otherwise: int) -> int:
    """What a launcher put into the environment; ConfigError when it is no whole number."""
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, a whole number is needed: unset it, or start with torchrun.")
    return int(text)


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
