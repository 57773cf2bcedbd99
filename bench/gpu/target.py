"""What a stage runs on: the GPU, or the emulated device at toy size with --dry."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tidegate

FAST = tidegate.EmulatedRates(h2d_bytes_per_second=4e9, d2h_bytes_per_second=4e9, update_params_per_second=1e9)


@dataclass(frozen=True)
class Target:
    """`results`: where the stages before this one have left theirs."""

    dry: bool
    results: Path
    shape: str = "1b"
    """Of the models that iterations are measured with: see `bench.gpu.shapes`."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def sized(self, full: int, toy: int) -> int:
        return toy if self.dry else full

    def offload(self, **settings: Any) -> tidegate.Offload:
        """On the emulated device, capacity that is not asked for is ample."""
        return tidegate.Offload(**settings, emulated=FAST)

    def finish_enqueued(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def result_of(self, stage: str) -> dict[str, Any] | None:
        path = self.results / f"{stage}.json"
        return json.loads(path.read_text()) if path.exists() else None


def run_stage(stage: Callable[[Target], dict[str, Any]]) -> None:
    parser = argparse.ArgumentParser(description=sys.modules[stage.__module__].__doc__)
    parser.add_argument("--dry", action="store_true", help="toy size, emulated device")
    parser.add_argument("--results", type=Path, required=True, help="folder of the stages' results")
    parser.add_argument("--shape", default="1b", help="of the model, for `iterations`")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        parser.error("no CUDA device is visible to torch; --dry runs on the emulated device")
    print(json.dumps({"dry": args.dry, **stage(Target(args.dry, args.results, args.shape))}, indent=1))


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "quartile_low": low, "quartile_high": high}
