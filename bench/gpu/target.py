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
from tidegate.agent.devices.cuda_problem import cuda_problem

DRY_SIDE_SECONDS = 200.0
LACKED_TIME = 3
"""Exit status of a stage that has to be run again for some of its rows."""
FAST = tidegate.EmulatedRates(h2d_bytes_per_second=4e9, d2h_bytes_per_second=4e9, update_params_per_second=1e9)


@dataclass(frozen=True)
class Target:
    """`results`: where the stages before this one have left theirs."""

    dry: bool
    results: Path
    stage: str = ""
    """Its name, as `iterations-1b`."""

    @property
    def shape(self) -> str:
        """Of the model, for `iterations`: see `bench.gpu.shapes`."""
        return self.stage.partition("-")[2] or "1b"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def sized(self, full: int, toy: int) -> int:
        return toy if self.dry else full

    def side_seconds(self, full: float) -> float:
        """What a side gets at first. At toy size it is mostly imports, which take long on a machine that is busy."""
        return max(full, DRY_SIDE_SECONDS) if self.dry else full

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
    parser.add_argument("--stage", default="", help="its name, as iterations-1b")
    args = parser.parse_args()
    problem = None if args.dry else cuda_problem()
    if problem is not None:
        parser.error(f"no GPU can be used: {problem}; --dry runs on the emulated device")
    result = stage(Target(args.dry, args.results, args.stage))
    print(json.dumps({"dry": args.dry, **result}, indent=1))
    if result.get("lacked_time"):
        print(f"Rows that lacked time: {', '.join(result['lacked_time'])}.", file=sys.stderr)
        sys.exit(LACKED_TIME)


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "quartile_low": low, "quartile_high": high}
