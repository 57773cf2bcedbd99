"""Predicts the updates that the stage `updates` has measured, from a calibration. It may be of another machine of the
same kind. Needs no GPU.

    python -m bench.gpu.predictions bench/results/gpu-nvidia-h100 > bench/results/gpu-nvidia-h100/predictions.json

The folder must hold `updates.json` and `calibration.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.updates import SLOTS, SUBGROUP_NUMEL
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import Subgroup
from tidegate.simulator.steady_state import Rank
from tidegate.simulator.what_if import what_if
from tidegate.speeds.saved_calibration import Calibration


def predictions(updates: dict[str, Any], calibration: dict[str, Any]) -> dict[str, Any]:
    """The measured and the predicted seconds of each setting, and the absolute errors as shares of the measured time:
    their median, and the largest."""
    card = Calibration.from_dict(calibration).card
    # Parameters are bf16, with 2 bytes of weight and of gradient, and 10 bytes of state each.
    subgroups = [Subgroup(i, SUBGROUP_NUMEL, 2, 2, 10) for i in range(updates["numel"] // SUBGROUP_NUMEL)]
    rows = []
    for setting in updates["settings"]:
        knobs = EffectiveKnobs(setting["stride"], setting["static_ratio"])
        rows.append({
            "stride": setting["stride"],
            "static_ratio": setting["static_ratio"],
            "update_seconds": setting["update_seconds"]["median"],
            "predicted_seconds": what_if(Rank(subgroups, SLOTS), knobs, card).update_seconds,
        })  # fmt: skip
    errors = [abs(row["predicted_seconds"] / row["update_seconds"] - 1) for row in rows]
    return {"settings": rows, "error_median": median(errors), "error_most": max(errors)}


def main() -> None:
    folder = Path(sys.argv[1])
    updates, calibration = (json.loads((folder / f"{name}.json").read_text()) for name in ("updates", "calibration"))
    print(json.dumps(predictions(updates, calibration), indent=1))


if __name__ == "__main__":
    main()
