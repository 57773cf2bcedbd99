"""Diagnosis of an unusable CUDA installation: reason and remedy. torch itself only reports that CUDA is not
available."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from typing import Final

import torch

DRIVERS: Final = "580 or newer for CUDA 13, 525.60 or newer for CUDA 12"
"""Driver versions that NVIDIA requires: https://docs.nvidia.com/deploy/cuda-compatibility/."""


@dataclass(frozen=True)
class CudaProblem:
    """Why CUDA cannot be used (`reason`) and what to do (`remedy`), each a phrase without a full stop."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


def cuda_problem() -> CudaProblem | None:
    """Diagnoses CUDA; returns None if CUDA can be used. Creates no CUDA context."""
    if torch.version.cuda is None:
        return CudaProblem(
            f"torch {torch.__version__} is built without CUDA",
            "where there is an NVIDIA GPU, install a build with CUDA: docs/gpu.md says which",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning is returned instead
        if torch.cuda.is_available():
            return None
    try:
        torch.cuda.init()  # raises what `is_available` swallows
    except Exception as error:
        return _diagnosed(str(error))
    return CudaProblem("torch says that no CUDA device is available", "see whether nvidia-smi lists the GPU")


def _diagnosed(message: str) -> CudaProblem:
    """Converts an error message of torch to reason and remedy."""
    version = re.search(r"too old \(found version (\d+)\)", message)
    if version is not None:
        major, minor = divmod(int(version.group(1)) // 10, 100)
        return CudaProblem(
            f"the NVIDIA driver supports CUDA {major}.{minor}, and torch {torch.__version__} is built for CUDA "
            f"{torch.version.cuda}",
            f"install a newer driver ({DRIVERS}), or a build of torch for CUDA {major}",
        )
    if "no NVIDIA driver" in message:
        return CudaProblem(
            "there is no NVIDIA driver",
            f"install one ({DRIVERS}) until nvidia-smi lists the GPU; a container needs the NVIDIA container toolkit "
            "and `--gpus all`",
        )
    if "No CUDA GPUs" in message:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return CudaProblem(
            f"the driver shows no GPU{hidden}",
            "see whether nvidia-smi lists it, and whether CUDA_VISIBLE_DEVICES hides it",
        )
    first = (message.strip().splitlines() or ["torch cannot initialise CUDA and gives no reason"])[0]
    return CudaProblem(first.rstrip("."), "see whether nvidia-smi lists the GPU")
