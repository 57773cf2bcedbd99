"""Stage: iterations with 2 to 16 threads for the CPU update, and with 1 to 8 sequences, of Tidegate and of ZeRO-3 with
CPU offload.

With more sequences a step computes more, and the share of the update gets smaller.
"""

from __future__ import annotations

import os
from typing import Any

from bench.gpu.rows import Rows
from bench.gpu.target import Target, run_stage

SIDE_SECONDS = 60.0


def settings(dry: bool) -> list[dict[str, int]]:
    if dry:
        return [{"threads": 1, "microbatch": 2}]
    cores = len(os.sched_getaffinity(0))
    threads = [{"threads": n, "microbatch": 1} for n in (2, 4, 8, 16) if n <= cores]
    return [*threads, *({"threads": 0, "microbatch": n} for n in (2, 4, 8))]


def stage(target: Target) -> dict[str, Any]:
    sides = ("tidegate", "zero3_cpu") if not target.dry else ("tidegate",)
    rows, measured = [], Rows(target)
    for setting in settings(target.dry):
        for side in sides:
            name = f"{side}, {', '.join(f'{what} {count}' for what, count in setting.items())}"
            row = measured.measure(
                name, side, "1b", limit=target.side_seconds(SIDE_SECONDS), steps=4, seconds=6, **setting
            )
            rows.append({**setting, **row})
    return {"shape": "1b", "rows": rows, "lacked_time": measured.lacked_time}


if __name__ == "__main__":
    run_stage(stage)
