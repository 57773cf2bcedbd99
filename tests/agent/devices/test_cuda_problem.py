"""Why CUDA cannot be used, from what torch does on machines whose driver is old, absent, or sees no GPU."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidegate.agent.devices import cuda_problem as module
from tidegate.agent.devices.cuda_problem import cuda_problem

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
NO_GPU = "No CUDA GPUs are available"
UNKNOWN = "CUDA unknown error - this may be due to an incorrectly set up environment.\nA second line."


def fake_torch(says: str, cuda: str | None = "13.0", available: bool = False) -> Any:
    """As torch answers: `is_available` warns at most, `init` raises."""

    def is_available() -> bool:
        if says == TOO_OLD:
            warnings.warn(f"CUDA initialization: {says}", UserWarning, stacklevel=2)
        return available

    def init() -> None:
        if says:
            raise RuntimeError(says)

    return SimpleNamespace(
        __version__="2.13.0", version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=is_available, init=init),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("says", "reason", "remedy"),
    [
        (TOO_OLD, "driver supports CUDA 12.2, and torch 2.13.0 is built for CUDA 13.0", "newer driver"),
        (NO_DRIVER, "no NVIDIA driver", "nvidia-smi"),
        (NO_GPU, "the driver shows no GPU", "CUDA_VISIBLE_DEVICES"),
        (UNKNOWN, "CUDA unknown error", "nvidia-smi"),
        ("", "no CUDA device is available", "nvidia-smi"),
    ],
)
def test_the_reason_that_torch_swallows_is_told(
    monkeypatch: pytest.MonkeyPatch, says: str, reason: str, remedy: str
) -> None:
    monkeypatch.setattr(module, "torch", fake_torch(says))
    found = cuda_problem()
    assert found is not None
    assert reason in found.reason
    assert remedy in found.remedy
    assert "\n" not in str(found)


def test_hidden_gpus_are_told_by_the_value_that_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", fake_torch(NO_GPU))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found = cuda_problem()
    assert found is not None
    assert "CUDA_VISIBLE_DEVICES='7'" in found.reason


def test_a_build_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", fake_torch("", cuda=None))
    found = cuda_problem()
    assert found is not None
    assert "torch 2.13.0 is built without CUDA" in found.reason


def test_there_is_none_where_cuda_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch", fake_torch("never asked", available=True))
    assert cuda_problem() is None


def test_it_agrees_with_torch_here() -> None:
    assert (cuda_problem() is None) == torch.cuda.is_available()
