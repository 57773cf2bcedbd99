"""Stage: measures whole iterations of one model shape on one GPU, with state in host memory. The trainings of Tidegate
and of other systems (sides) are measured one after the other; if time allows, all are measured a second time.

`speedup`: iteration time of another side divided by Tidegate's. Other sides are, for example, DeepSpeed's ZeRO-3 with
CPU offload, and TwinFlow with the same static ratio. `all_cpu` is Tidegate with all updates on the CPU; it shows the
gain from asynchronous gradient copies and the faster CPU kernel alone. `resident` is Tidegate with all state on the
GPU, without the memory limit of the others; it is the bound for offload.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench.gpu.rows import Rows
from bench.gpu.target import Target, run_stage

STATIC_RATIO = 0.2
ROUNDS = 2
SIDE_SECONDS = {"1b": 60.0, "3b": 100.0, "7b": 200.0}
SIDES: list[tuple[str, str, dict[str, Any]]] = [
    ("tidegate", "tidegate", {}),
    ("zero3_cpu", "zero3_cpu", {}),
    ("tidegate_static", "tidegate", {"static_ratio": STATIC_RATIO}),
    ("twinflow_static", "twinflow", {"static_ratio": STATIC_RATIO}),
    ("all_cpu", "all_cpu", {}),
    ("torchao", "torchao", {}),
    ("resident", "resident", {}),
    ("tidegate_overlap", "tidegate_overlap", {}),
    ("superoffload", "superoffload", {}),
]
DRY_SIDES = ("tidegate", "tidegate_overlap", "torchao")
"""The sides that run with --dry: two of Tidegate, and torchao, which is often not installed, so that a missing package
is tried, too. DeepSpeed is left out, because it would first compile its kernels."""
AGAINST = {"zero3_cpu": "tidegate", "twinflow_static": "tidegate_static", "superoffload": "tidegate",
           "torchao": "tidegate", "all_cpu": "tidegate", "resident": "tidegate"}  # fmt: skip


def stage(target: Target) -> dict[str, Any]:
    shape, measured = target.shape, Rows(target)
    limit = target.side_seconds(SIDE_SECONDS[shape])
    sides = SIDES if not target.dry else [one for one in SIDES if one[0] in DRY_SIDES]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in SIDES}
    for turn in range(target.sized(ROUNDS, 1)):
        for name, side, settings in sides:
            if turn and (measured.seconds_left < SIDE_SECONDS[shape] or "not_measured" in rows[name][0]):
                continue
            steps, seconds = target.sized(6, 2), target.sized(12, 2)
            row = measured.measure(
                f"{name}, turn {turn + 1}", side, shape, limit=limit, steps=steps, seconds=seconds, **settings
            )  # fmt: skip
            rows[name].append(row)
    return {
        "shape": shape, "static_ratio": STATIC_RATIO, "rounds": rows, "speedup": speedups(rows),
        "lacked_time": measured.lacked_time,
    }  # fmt: skip


def speedups(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Speedups of Tidegate, for iteration and update: the median time of another side divided by that of Tidegate.
    Returns them by name of the other side; pairs of which one side was not measured are left out."""
    found: dict[str, dict[str, float]] = {}
    for other, ours in AGAINST.items():
        theirs, own = _measured(rows[other]), _measured(rows[ours])
        if theirs and own:
            found[other] = {
                what: _median(theirs, what) / _median(own, what) for what in ("iteration_seconds", "update_seconds")
            }
    return found


def _measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "not_measured" not in row]


def _median(rows: list[dict[str, Any]], what: str) -> float:
    return statistics.median(row[what]["median"] for row in rows)


if __name__ == "__main__":
    run_stage(stage)
