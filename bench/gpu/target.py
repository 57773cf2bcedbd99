"""The target of a stage: the GPU, or with --dry the emulated device at toy size."""

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
"""Exit status of a stage that must be run again, because some of its rows lacked time."""
FAST = tidegate.EmulatedRates(h2d_bytes_per_second=4e9, d2h_bytes_per_second=4e9, update_params_per_second=1e9)


@dataclass(frozen=True)
class Target:
    """The target of one run of a stage. dry: emulated device, toy size. results: folder with the results of all
    stages."""

    dry: bool
    results: Path
    stage: str = ""
    """Name of the stage, such as `iterations-1b`."""
    seconds: float = 430.0
    """Time for the rows of a stage. bench/gpu.sh ends the stage 50 seconds later."""

    @property
    def shape(self) -> str:
        """Name of the model shape (in `bench.gpu.shapes`) at the end of the stage's name."""
        return self.stage.partition("-")[2] or "1b"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def sized(self, full: int, toy: int) -> int:
        return toy if self.dry else full

    def side_seconds(self, full: float) -> float:
        """Time limit in seconds for the first measurement of one side: `full` on a GPU, and at least DRY_SIDE_SECONDS
        with --dry, where imports take most of the time and are slow on a busy machine."""
        return max(full, DRY_SIDE_SECONDS) if self.dry else full

    def offload(self, **settings: Any) -> tidegate.Offload:
        """Offload settings with these arguments. The emulated device (--dry) gets fast rates; a GPU ignores them."""
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
    parser.add_argument("--seconds", type=float, default=Target.seconds, help="for the rows of the stage")
    args = parser.parse_args()
    problem = None if args.dry else cuda_problem()
    if problem is not None:
        parser.error(f"no GPU can be used: {problem}; --dry runs on the emulated device")
    result = stage(Target(args.dry, args.results, args.stage, args.seconds))
    print(json.dumps({"dry": args.dry, **result}, indent=1))
    if result.get("lacked_time"):
        print(f"Rows that lacked time: {', '.join(result['lacked_time'])}.", file=sys.stderr)
        sys.exit(LACKED_TIME)


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "quartile_low": low, "quartile_high": high}
