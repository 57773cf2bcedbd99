"""The ranks of a training: this process's rank, the ranks of its host, and collectives for values that must agree."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self, TypeVar

import torch

from tidegate.agent.cgroups import usable_cpus
from tidegate.errors import ConfigError
from tidegate.logs import event

log = logging.getLogger("tidegate")

T = TypeVar("T")

_LOCAL_SIZE_VARIABLES: Final = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Environment variables with the number of ranks on this host, as torchrun, deepspeed and mpirun set them."""
_LOCAL_RANK_VARIABLES: Final = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
"""Environment variables with the rank among those of the host, as torchrun or deepspeed, mpirun and srun set them. srun
counts last: it gives one number to all ranks that a launcher starts in its task."""
_SLURM_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""Matches a number of tasks as SLURM writes it: "4" for one node, "4(x2)" for each of 2 consecutive nodes."""


def local_rank() -> int:
    """The rank of this process among those of its host, 0 without a launcher. Raises ConfigError if the first of
    `_LOCAL_RANK_VARIABLES` that is set is not a whole number."""
    return next((_environment_int(name, 0) for name in _LOCAL_RANK_VARIABLES if name in os.environ), 0)


def ranks_of_host() -> int:
    """Number of ranks that the launcher started on this host, at least 1; 1 without a launcher.

    The number is read from the first of `_LOCAL_SIZE_VARIABLES` that is set; without them, from SLURM_NTASKS_PER_NODE,
    which srun sets. Raises ConfigError if one of `_LOCAL_SIZE_VARIABLES` is not a whole number.
    """
    for name in _LOCAL_SIZE_VARIABLES:
        if name in os.environ:
            return max(1, _environment_int(name, 1))
    return max(1, _slurm_tasks_of_node() or 1)


def cpu_lane_threads() -> int:
    """Number of threads for the CPU lane of this rank, at least 1: the cores that the process may use, or as many as
    its quota of CPU time is worth, minus one for each training thread on these cores.

    The cores of a host are not divided among its ranks. Threads without work sleep, so that a rank which waits for a
    path or its device leaves the cores to the others; when all ranks compute, the kernel divides the time. A rank that
    a launcher has bound to cores of its own uses only these.
    """
    cores, allowed = usable_cpus(), len(os.sched_getaffinity(0))
    is_bound = cores == allowed < (os.cpu_count() or 1)
    return max(1, cores - (1 if is_bound else ranks_of_host()))


def ranks_that_share_host() -> int:
    """Number of ranks of this training that share the memory of this host; 1 for a training with a single process."""
    return ranks_of_host() if Ranks.current().count > 1 else 1


def check_ranks_are_known(when_built: int, *, has_paths: bool) -> None:
    """Checks, at the first step, whether the optimizer was built before the process group existed.

    when_built: number of ranks when the optimizer was built. Raises ConfigError if there are more now and the optimizer
    has storage paths, because their files name the rank; without paths a warning is logged.
    """
    now = Ranks.current().count
    if now <= when_built:
        return
    text = (
        f"The optimizer was built before torch.distributed.init_process_group, for {when_built} rank, and now there "
        f"are {now} ranks. %s Build the optimizer after init_process_group."
    )
    if has_paths:
        raise ConfigError(text % "The files on its storage paths would have a wrong rank.")
    log.warning(
        text, "It copies gradients before and after they are averaged, and all ranks of a host want its whole memory.",
        extra=event("built_before_ranks", ranks=now),
    )  # fmt: skip


def _slurm_tasks_of_node() -> int | None:
    """Number of tasks that srun started on this node; None without srun, or when it cannot be read.

    SLURM_NTASKS_PER_NODE is one number for all nodes, or a list: "2(x3),1" means 2 tasks on each of the first 3 nodes
    and 1 task on the fourth. SLURM_NODEID is the position of this node in the list, from 0.
    """
    counts: list[tuple[int, int]] = []
    for part in os.environ.get("SLURM_NTASKS_PER_NODE", "").split(","):
        found = _SLURM_COUNT.fullmatch(part)
        if found is None:
            return None
        counts.append((int(found[1]), int(found[2] or 1)))
    if len({tasks for tasks, _ in counts}) == 1:
        return counts[0][0]
    position = os.environ.get("SLURM_NODEID", "")
    if not position.isdecimal():
        return None
    left = int(position)
    for tasks, nodes in counts:
        if left < nodes:
            return tasks
        left -= nodes
    return None


def _environment_int(name: str, otherwise: int) -> int:
    """The value of an environment variable that a launcher sets, or `otherwise` if it is not set. Raises ConfigError if
    the value is not a whole number."""
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, a whole number is needed: unset {name}, or start with torchrun.")
    return int(text)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank among `count` ranks. All ranks must call the methods that communicate (collectives) in the
    same order."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Self:
        """Returns rank and number of ranks in the default process group; without a process group, rank 0 of 1 rank."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())

    def broadcast_from_first(self, mine: T) -> T:
        """Broadcasts the value of rank 0, and returns it."""
        if self.count == 1:
            return mine
        values = [mine]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def all_gather(self, mine: T) -> list[T]:
        """The values of all ranks, in rank order."""
        if self.count == 1:
            return [mine]
        values: list[T] = [mine] * self.count
        torch.distributed.all_gather_object(values, mine)
        return values

    def all_reduce_min(self, mine: Sequence[float]) -> list[float]:
        """Element-wise minimum over all ranks, by one small all-reduce of doubles."""
        if self.count == 1:
            return list(mine)
        numbers = torch.tensor(mine, dtype=torch.float64, device=_device_of_collectives())
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN)
        return numbers.tolist()

    def all_true(self, mine: bool) -> bool:
        """Whether `mine` is true on every rank; waits for all ranks."""
        return all(self.all_gather(mine))

    @contextmanager
    def failing_together(self, elsewhere: Exception) -> Iterator[None]:
        """Context manager for a block that all ranks run. If the block raises on a rank, that error is raised there,
        and `elsewhere` on the ranks where the block succeeded; otherwise they would wait for minutes in the next
        collective. A collective call of all ranks."""
        try:
            yield
        except BaseException:
            self.all_true(False)
            raise
        if not self.all_true(True):
            raise elsewhere


def _device_of_collectives() -> str:
    """Type of the device whose tensors the process group exchanges: the CPU if it can, else for example `cuda`."""
    # Not `get_backend`: it is "undefined" if the group was made without the name of a backend.
    devices = [one.split(":")[0] for one in torch.distributed.get_backend_config().split(",")]
    return "cpu" if "cpu" in devices else devices[0]
