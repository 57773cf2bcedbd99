"""Stage: runs the tests that need a GPU, and returns the counts of their outcomes. With --dry they are only
collected."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from bench.gpu.target import Target, run_stage


def stage(target: Target) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(
        [*command, "--collect-only"] if target.dry else command,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(done.returncode)
    last = done.stdout.strip().splitlines()[-1]
    return {"counts": {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last)}, "summary": last}


if __name__ == "__main__":
    run_stage(stage)
