"""What test_bad_writes runs: two good steps, then one whose writes hang or of which one fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import tidegate
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.errors import LaneStuckError

base = Path(sys.argv[1])
paths = {}
for name in ("one", "two"):
    (base / name).mkdir()
    paths[name] = PathSettings(directory=base / name)
params = [torch.nn.Parameter(torch.randn(800_000)) for _ in range(2)]
fast = tidegate.EmulatedRates(h2d_bytes_per_second=1e12, d2h_bytes_per_second=1e12, update_params_per_second=1e12)
offload = tidegate.Offload(
    paths=paths, tier_split="one:1,two:1", stride="off", subgroup_numel=200_000, host_cache=0, emulated=fast,
    watchdog_seconds=0.5,
)  # fmt: skip
optimizer = tidegate.AdamW(params, offload=offload)


def step() -> None:
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.wait()


step()
step()
Path(os.environ["FLAG"]).touch()
try:
    step()
except LaneStuckError as error:
    print("stuck", error)
else:
    assert optimizer.engine.store is not None
    print(*optimizer.engine.store.retired, *optimizer.engine.memory.residence)
