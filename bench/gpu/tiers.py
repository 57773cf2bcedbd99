"""Iterations with state on the local disk: no host cache, half of the state cached, and all in host memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.gpu.iteration import run_side
from bench.gpu.target import Target, run_stage


def stage(target: Target) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    if not target.dry:
        rows["host"] = run_side(target, "tidegate", "1b", steps=4, seconds=10, limit=90)
    half = rows.get("host", {}).get("numel", 0) * 5  # 10 bytes a parameter
    with tempfile.TemporaryDirectory(dir=target.results) as folder:
        for name, cache in (("disk", 0), ("disk_half_cached", half))[: target.sized(2, 1)]:
            path = Path(folder, name)
            path.mkdir()
            more: dict[str, Any] = {"paths": {"disk": str(path)}, "host_cache": cache}
            rows[name] = run_side(target, "tidegate", "1b", steps=4, seconds=40, limit=150, **more)
    return {"shape": "1b", "rows": rows}


if __name__ == "__main__":
    run_stage(stage)
