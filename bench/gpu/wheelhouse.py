"""Makes a folder of wheels for bench/gpu.sh, on a machine with a network: all needed packages except torch and its
libraries.

    python3 -m bench.gpu.wheelhouse wheels

Use the same Python version and processor architecture as the machine with the GPU. pip resolves all requirements
together; torch and its libraries are left out, because the machine with the GPU has a torch that suits its driver.
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
    """Whether the package belongs to torch, so that it is left out."""
    return name not in NOT_OF_TORCH and any(
        name.startswith(one) if one.endswith("-") else name == one for one in OF_TORCH
    )


def chosen(report: dict[str, list[dict[str, dict[str, str]]]]) -> list[str]:
    """The packages that pip's report would install, as NAME==VERSION, without those that belong to torch."""
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
