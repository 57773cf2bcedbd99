"""Stage: iterations with state on the local disk (without host cache, and with half of the state cached), and with all
state in host memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.gpu.rows import Rows
from bench.gpu.target import Target, run_stage


def stage(target: Target) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    measured = Rows(target)
    if not target.dry:
        rows["host"] = measured.measure("host", "tidegate", "1b", limit=90, steps=4, seconds=10)
    half = rows.get("host", {}).get("numel", 0) * 5  # 10 bytes a parameter
    with tempfile.TemporaryDirectory(dir=target.results) as folder:
        for name, cache in (("disk", 0), ("disk_half_cached", half))[: target.sized(2, 1)]:
            path = Path(folder, name)
            path.mkdir()
            more: dict[str, Any] = {"paths": {"disk": str(path)}, "host_cache": cache}
            rows[name] = measured.measure(
                name, "tidegate", "1b", limit=target.side_seconds(150), steps=4, seconds=40, **more
            )
    return {"shape": "1b", "rows": rows, "lacked_time": measured.lacked_time}


if __name__ == "__main__":
    run_stage(stage)
