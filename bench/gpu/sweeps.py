"""Iterations with 2 to 16 threads of the CPU update, and with 1 to 8 sequences: ours and ZeRO-3's with CPU offload.

The more a step computes, the less the update weighs.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bench.gpu.iteration import run_side
from bench.gpu.target import Target, run_stage

STAGE_SECONDS = 430.0
SIDE_SECONDS = 60.0


def settings(dry: bool) -> list[dict[str, int]]:
    if dry:
        return [{"threads": 1, "microbatch": 2}]
    cores = len(os.sched_getaffinity(0))
    threads = [{"threads": n, "microbatch": 1} for n in (2, 4, 8, 16) if n <= cores]
    return [*threads, *({"threads": 0, "microbatch": n} for n in (2, 4, 8))]


def stage(target: Target) -> dict[str, Any]:
    sides = ("tidegate", "zero3_cpu") if not target.dry else ("tidegate",)
    rows, end = [], time.monotonic() + STAGE_SECONDS
    for setting in settings(target.dry):
        for side in sides:
            limit = min(SIDE_SECONDS, max(1.0, end - time.monotonic()))
            rows.append({**setting, **run_side(target, side, "1b", steps=4, seconds=6, limit=limit, **setting)})
    return {"shape": "1b", "rows": rows}


if __name__ == "__main__":
    run_stage(stage)
