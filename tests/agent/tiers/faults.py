"""How storage is broken in tests: transfers that fail with a real errno, or are slow; file systems that really fail."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST
from tests.agent.engine.test_tiered_exactness import Pair
from tidegate.agent.tiers.file_moves import FileMover
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.kernels import IoPool

NUMEL, SUBGROUP = 40_000, 5_000
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Refused:
    """The ticket of a transfer that the system refused."""

    error: int
    start: float = field(default_factory=time.monotonic)
    end: float = field(default_factory=time.monotonic)
    ok: bool = False
    checksum_mismatch: bool = False
    end_of_file: bool = False
    failed_block: int = 0

    def __hash__(self) -> int:
        return id(self)

    def wait(self, timeout: float | None = None) -> bool:
        return True


class Delayed:
    """The ticket of a transfer that takes so much longer."""

    def __init__(self, real: Any, seconds: float) -> None:
        self._real, self._until = real, time.monotonic() + seconds

    def wait(self, timeout: float | None = None) -> bool:
        left = self._until - time.monotonic()
        threading.Event().wait(max(0.0, left if timeout is None else min(left, timeout)))
        return time.monotonic() >= self._until and self._real.wait(timeout)

    def __getattr__(self, name: str) -> Any:
        return max(self._real.end, self._until) if name == "end" else getattr(self._real, name)


class FaultyPool:
    """The pool of a path; `faults` says by operation (`read`, `write`) what the system answers to a transfer: an errno,
    0 for nothing unusual, or a delay in seconds as a float. What fails was moved nevertheless: nobody may rely on an
    old state being there still."""

    def __init__(self, real: IoPool) -> None:
        self.real, self.faults = real, dict[str, Callable[[], float]]()

    def read(self, *args: Any) -> Any:
        return self._moved("read", self.real.read(*args))

    def write(self, *args: Any) -> Any:
        return self._moved("write", self.real.write(*args))

    def _moved(self, operation: str, ticket: Any) -> Any:
        code = self.faults[operation]() if operation in self.faults else 0
        if isinstance(code, float):
            return Delayed(ticket, code)
        if not code:
            return ticket
        ticket.wait()
        return Refused(code)

    def close(self) -> None:
        self.real.close()


def store_of(optimizer: tidegate.AdamW) -> TierStore:
    assert optimizer.engine.store is not None
    return optimizer.engine.store


def break_path(optimizer: tidegate.AdamW, name: str, operation: str, fault: Callable[[], float]) -> None:
    break_mover(store_of(optimizer).paths[name]._mover, operation, fault)


def break_mover(mover: FileMover, operation: str, fault: Callable[[], float]) -> None:
    if not isinstance(mover.pool, FaultyPool):
        mover.pool = FaultyPool(mover.pool)  # type: ignore[assignment]
        mover.prepare = lambda *_: None  # type: ignore[method-assign]  # native tasks have no faults of Python's
    mover.pool.faults[operation] = fault


def heal_path(optimizer: tidegate.AdamW, name: str, operation: str) -> None:
    heal_mover(store_of(optimizer).paths[name]._mover, operation)


def heal_mover(mover: FileMover, operation: str) -> None:
    assert isinstance(mover.pool, FaultyPool)
    del mover.pool.faults[operation]
    if not mover.pool.faults:
        mover.pool = mover.pool.real
        del mover.prepare


def always(code: int) -> Callable[[], int]:
    return lambda: code


def once(code: int, times: int = 1) -> Callable[[], int]:
    left = [code] * times
    return lambda: left.pop() if left else 0


def slow(seconds: float) -> Callable[[], float]:
    """Each transfer takes so much longer."""
    return lambda: seconds


@dataclass
class Snapshot:
    """What a checkpoint would hold, with the oracle as it was."""

    weights: list[torch.Tensor]
    state: dict[str, Any]
    plain: Any

    @classmethod
    def of(cls, pair: Pair) -> Snapshot:
        # Deep: what `state_dict` returns may share nothing with what training changes.
        weights = [p.detach().clone() for p in pair.params]
        return cls(weights, copy.deepcopy(pair.optimizer.state_dict()), copy.deepcopy(pair.plain.params))

    def load(self, pair: Pair) -> None:
        with torch.no_grad():
            for param, weight in zip(pair.params, self.weights, strict=True):
                param.copy_(weight)
        pair.optimizer.load_state_dict(self.state)
        pair.plain.params = copy.deepcopy(self.plain)


@contextmanager
def training(
    paths: dict[str, Any], dtype: torch.dtype = torch.float32, *, size: int = 1, **changes: Any
) -> Iterator[Pair]:
    """An optimizer with its oracle; eight subgroups of `size` times SUBGROUP, all of them on paths."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(size * NUMEL // 2, generator=generator).to(dtype)) for _ in range(2)]
    settings: dict[str, Any] = {"stride": 2.0, "subgroup_numel": size * SUBGROUP, "host_cache": 0, "emulated": FAST}
    offload = tidegate.Offload(paths=paths, **(settings | changes))
    with tidegate.AdamW(params, lr=0.02, offload=offload) as optimizer:
        yield Pair.of(optimizer, None)


def train(pair: Pair, first: int, count: int = 1) -> None:
    for step in range(first, first + count):
        pair.train(step, micro_batches=1, some=False, skip=False)


def lives(pair: Pair) -> set[str]:
    pair.optimizer.wait()
    return set(pair.optimizer.engine.memory.residence)


def state_file(pair: Pair, name: str, subgroup: int | None = None) -> Path:
    """The file of a subgroup on a path; of any that lives there when none is named."""
    residence = pair.optimizer.engine.memory.residence
    chosen = residence.index(name) if subgroup is None else subgroup
    return Path(store_of(pair.optimizer).paths[name].states[chosen].name)


def flip_bit(file: Path, at: int = 3 * 4096 + 17) -> None:
    fd = os.open(file, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ 8]), at)
        os.fsync(fd)
    finally:
        os.close(fd)


def is_locked(settings: PathSettings) -> bool:
    """Whether another process would have to wait for the path: asked from another one, as locks are per process."""
    code = (
        "import sys\n"
        "from tidegate.agent.tiers.path_locks import TierLocks, device_key, lock_directory\n"
        "locks = TierLocks(lock_directory(), device_key(sys.argv[1]), int(sys.argv[2]), timeout_seconds=0.2)\n"
        "with locks.hold() as held:\n"
        "    print(held.acquired)\n"
    )
    command = [sys.executable, "-c", code, os.fspath(settings.directory), str(settings.lock_slots)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "False"


# ---- file systems of their own


def require_mounts(*programs: str) -> None:
    """Skips, with the reason, where this machine cannot mount in a namespace of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting file systems needs root")
    for program in ("unshare", "mount", *programs):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    tried = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"this machine does not let us mount: {tried.stderr.strip()}")
    if "losetup" in programs and subprocess.run(["losetup", "-f"], capture_output=True, check=False).returncode:
        pytest.skip("there is no free loop device")


def in_namespace(scenario: str, directory: Path) -> str:
    """Runs a scenario of `broken_file_systems` in a process with mounts of its own, which end with it."""
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m"]
    done = subprocess.run(
        [*command, "tests.agent.tiers.broken_file_systems", scenario, os.fspath(directory)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout.removeprefix("SKIP").strip())
    assert done.returncode == 0, f"{scenario}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
