"""Makes a folder of wheels for bench/gpu.sh on a machine with a network: all that it needs but torch and its libraries.

    python3 -m bench.gpu.wheelhouse wheels

Run it with the Python version and on the kind of processor of the machine with the GPU. pip resolves everything at
once; torch and what belongs to it are left out, because the machine with the GPU has a torch that suits its driver.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.gpu.needs import needs, package

OF_TORCH = ("torch", "triton", "cuda-", "nvidia-")
NOT_OF_TORCH = ("nvidia-ml-py",)


def left_out(name: str) -> bool:
    """Whether a package comes with torch, and with no other."""
    return name not in NOT_OF_TORCH and any(
        name.startswith(one) if one.endswith("-") else name == one for one in OF_TORCH
    )


def chosen(report: dict[str, list[dict[str, dict[str, str]]]]) -> list[str]:
    """NAME==VERSION of all that pip's report would install, but for what comes with torch."""
    found = [row["metadata"] for row in report["install"]]
    return sorted(f"{one['name']}=={one['version']}" for one in found if not left_out(package(one["name"])))


def make(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    asked = [need.requirement for need in needs()]
    resolved = subprocess.run(
        [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *asked],
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), *chosen(json.loads(resolved.stdout))], check=True
    )


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    make(Path(sys.argv[1]))
