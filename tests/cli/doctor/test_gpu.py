"""`tidegate doctor --gpu`: what each check says of a GPU that does as it should, and of one that does not."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from tests import forked
from tests.agent.devices.fake_cuda import FakeCuda
from tests.services import ROOT
from tidegate.agent.devices.cuda_problem import CudaProblem
from tidegate.agent.telemetry.nvml import DividedGpuError
from tidegate.cli.doctor import gpu
from tidegate.cli.doctor.gpu import Check, CheckFailed, copies, examine_gpu, launch, lines, overlap, pinned_memory
from tidegate.cli.doctor.machine import Finding
from tidegate.kernels.adamw import IMPLEMENTATION, TRITON
from tidegate.plan.ops import D2H, H2D

CPU = torch.device("cpu")


class NothingPinned(FakeCuda):
    def pin(self, address: int, nbytes: int) -> str:
        return "cudaHostRegister: operation not supported"


def test_without_a_gpu_one_line_says_why_and_what_helps() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    env = {**os.environ, "TIDEGATE_DAEMON": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "tidegate", "doctor", "--gpu"]
    done = forked.run(command, cwd=ROOT, env=env, timeout=60)
    (line,) = done.stdout.splitlines()
    assert (done.returncode, line.split()[:2]) == (1, ["failed", "driver"])
    assert "built without CUDA; " in line
    done = forked.run([*command, "--json"], cwd=ROOT, env=env, timeout=60)
    assert [found["verdict"] for found in json.loads(done.stdout)] == ["bad"]
    done = forked.run([*command, "--path", "/"], cwd=ROOT, env=env, timeout=60)
    assert (done.returncode, "one at a time" in done.stderr) == (2, True)


def test_pages_are_registered_and_given_back() -> None:
    runtime = FakeCuda()
    assert "64 MiB registered" in pinned_memory(runtime)
    assert runtime.pinned == {}
    with pytest.raises(CheckFailed, match=r"operation not supported.*ulimit -l"):
        pinned_memory(NothingPinned())


def test_kernels_with_other_results_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(gpu.self_test, "differences", lambda kernels, place, update: found)
    assert "bit for bit" in launch(CPU, IMPLEMENTATION.in_torch("cpu"), TRITON)
    found.append("the update of F32 weights")
    with pytest.raises(
        CheckFailed, match=r"differ from the reference implementation: the update of F32 weights; updates run as torch"
    ):
        launch(CPU, IMPLEMENTATION.in_torch("cpu"), TRITON)


def test_what_triton_lacks_is_said_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "missing_for_triton", lambda: ["There is no C compiler.", "No Python.h."])
    with pytest.raises(CheckFailed, match=r"no C compiler\. No Python\.h; updates run as torch operations"):
        gpu.triton(CPU)


@pytest.mark.parametrize("at_once", [True, False])
def test_copies_that_never_run_at_once_are_a_failure(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    spans = {H2D: [(0.0, 1.0), (1.0, 2.0)], D2H: [(0.5, 1.5)] if at_once else [(2.0, 3.0)]}
    monkeypatch.setattr(gpu, "both_ways", lambda device: spans)
    if at_once:
        assert "100% of it at once" in copies(FakeCuda())
    else:
        with pytest.raises(CheckFailed, match="CUDA_DEVICE_MAX_CONNECTIONS"):
            copies(FakeCuda())


def test_both_ways_copies_on_the_lanes_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake runtime: every access is held against what orders it."""
    monkeypatch.setattr(gpu, "COPY_BYTES", 1 << 16)
    runtime = FakeCuda(memory_bytes=1 << 20)
    device = gpu.CudaDevice(runtime)
    spans = gpu.both_ways(device)
    device.close()
    assert {lane: len(found) for lane, found in spans.items()} == {H2D: gpu.COPIES, D2H: gpu.COPIES}
    assert runtime.error is None


def test_overlap_is_the_time_of_both() -> None:
    assert overlap([(0, 2), (2, 4)], [(1, 3)]) == 2
    assert overlap([(0, 1)], [(1, 2)]) == 0


def test_nvml_that_does_not_know_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(nvml: Any, uuid: str) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(gpu, "Gpu", unknown)
    with pytest.raises(CheckFailed, match=r"GPU-1-2.*compute,utility"):
        gpu.nvml(CPU)
    closed: list[bool] = []
    told = SimpleNamespace(
        utilization_ratio=lambda: 0.25, pcie=SimpleNamespace(name="gpm"), close=lambda: closed.append(True)
    )
    monkeypatch.setattr(gpu, "Gpu", lambda nvml, uuid: told)
    assert gpu.nvml(CPU) == "utilization 25%, PCIe figures from: gpm"
    assert closed == [True]


def test_a_part_of_a_gpu_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def divided(nvml: Any, uuid: str) -> None:
        raise DividedGpuError(uuid)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(gpu, "Gpu", divided)
    found = Check("NVML", lambda: gpu.nvml(CPU), "install another build").finding()
    assert found == Finding("NVML", "good", "this is a part of a GPU (MIG): NVML has no figures of it; training works")


def test_an_error_that_nobody_foresaw_is_a_finding_with_a_remedy() -> None:
    def broken() -> str:
        raise RuntimeError("CUDA error: an illegal instruction.\nCompile with TORCH_USE_CUDA_DSA")

    found = Check("context", broken, "install another build").finding()
    assert found == Finding(
        "context", "bad", "RuntimeError: CUDA error: an illegal instruction; install another build"
    )  # fmt: skip


def test_what_needs_a_context_is_not_tried_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: torch.device) -> str:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(gpu, "cuda_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "context", broken)
    found = examine_gpu()
    assert [(one.check, one.verdict) for one in found] == [("driver", "good"), ("context", "bad")]
    assert lines(found)[1].startswith("failed  context  RuntimeError: no kernel image")
    monkeypatch.setattr(gpu, "cuda_problem", lambda: CudaProblem("there is no driver", "install one"))
    assert lines(examine_gpu()) == ["failed  driver  there is no driver; install one"]


def test_each_check_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuda_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "TorchCuda", lambda place: FakeCuda())
    for name in ("context", "pinned_memory", "triton", "copies", "nvml"):
        monkeypatch.setattr(gpu, name, lambda _, name=name: f"{name} works")
    said = lines(examine_gpu())
    assert [line.split("  ")[0] for line in said] == ["ok"] * 6
    assert [line.split()[-2] for line in said[1:]] == ["context", "pinned_memory", "triton", "copies", "nvml"]
