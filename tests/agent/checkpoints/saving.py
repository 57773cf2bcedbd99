"""A run beside the oracle, whose checkpoints the tests look at."""

from __future__ import annotations

import json
import zlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

import tidegate
from tests.agent.plain_adamw import PlainAdamW
from tidegate.agent.checkpoints.writer_lock import LOCK_FILE

SIZES = (3000, 500, 77, 4096)


class Run:
    """An optimizer beside the oracle, which has its weights after each step."""

    def __init__(self, dtype: torch.dtype = torch.float32, like: Run | None = None, **offload: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]
        if like is not None:
            for mine, theirs in zip(self.params, like.params, strict=True):
                mine.data.copy_(theirs.data)
        chosen: dict[str, Any] = {"stride": 2.0, "subgroup_numel": 600, "cpu_threads": 1, **offload}
        self.optimizer = tidegate.AdamW(self.params, lr=0.1, max_grad_norm=1.0, offload=tidegate.Offload(**chosen))
        self.plain = PlainAdamW([dict(group) for group in self.optimizer.param_groups], 1.0)
        if like is not None:
            self.plain = deepcopy(like.plain)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.params]
            for param, grad in zip(self.params, grads, strict=True):
                (param * grad).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.plain.step(list(grads))
            assert self.plain.same_weights(self.params), step

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.optimizer.close()


def both(disk: Path, memory: Path, **changes: Any) -> dict[str, Any]:
    """Some state in files on the disk, some in memory, some cached, some on the device."""
    paths = {"disk": disk, "memory": memory}
    return {"paths": paths, "tier_split": "disk:2,memory:1", "host_cache": 8000, "static_ratio": 0.1, **changes}


def other_ways(disk: Path, memory: Path) -> dict[str, dict[str, Any]]:
    (disk / "second").mkdir(exist_ok=True)
    three = {"a": disk, "b": disk / "second", "c": memory}
    return {
        "the same": both(disk, memory),
        "larger subgroups, nothing cached": both(disk, memory, subgroup_numel=1777, host_cache=0, static_ratio=0.0),
        "three paths": both(disk, memory, paths=three, tier_split="a:1,b:2,c:1", stride="off"),
        "one path": {"paths": {"disk": disk}, "host_cache": 0, "stride": 3.0, "subgroup_numel": 77},
        "no paths": {"stride": 1.0, "subgroup_numel": 5000},
    }


WAYS = ("the same", "larger subgroups, nothing cached", "three paths", "one path", "no paths")


def names_in(directory: Path) -> list[str]:
    """What is in a directory of checkpoints, but for the lock file of whoever writes there."""
    return sorted(path.name for path in directory.iterdir() if path.name != LOCK_FILE)


def files_of(checkpoint: tidegate.Checkpoint) -> list[Path]:
    return sorted(checkpoint.folder.glob("*.tide"))


def state_files(checkpoint: tidegate.Checkpoint) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files_of(checkpoint)}


def links(checkpoint: tidegate.Checkpoint) -> list[int]:
    return [path.stat().st_nlink for path in files_of(checkpoint)]


def repack(manifest: Path, **changed: Any) -> None:
    """Other values in a manifest, with the checksum that they have: as they were written so."""
    write_manifest(manifest, json.loads(manifest.read_bytes())["checkpoint"] | changed)


def write_manifest(manifest: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    manifest.write_bytes(json.dumps({"crc32": zlib.crc32(text.encode()), "checkpoint": values}, indent=1).encode())


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Turns one bit of a file over. `at`: which byte, -1 for the last."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
