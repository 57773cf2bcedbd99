"""`tidegate doctor --gpu`: tests each GPU feature that training needs, and names a remedy for each failure."""

from __future__ import annotations

import importlib
import itertools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from tidegate.agent.devices.base import Copy, Device
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.cuda_problem import cuda_problem
from tidegate.agent.devices.cuda_runtime import CudaRuntime
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.telemetry.nvml import DividedGpuError, Gpu
from tidegate.cli.doctor.machine import Finding
from tidegate.kernels import implementation
from tidegate.kernels.arithmetic import self_test
from tidegate.kernels.arithmetic.device_calls import GpuKernels
from tidegate.kernels.arithmetic.implementation import TritonUpdate
from tidegate.plan.ops import D2H, H2D
from tidegate.triton_needs import missing_for_triton

PINNED_BYTES: Final = 64 << 20
COPY_BYTES: Final = 256 << 20
COPIES: Final = 4
Span = tuple[float, float]
"""Start and end of a copy, in seconds."""


class CheckFailed(Exception):
    """A check has failed. `reason` and `remedy`: phrases without a full stop."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")


@dataclass(frozen=True)
class Check:
    """One check. `run` performs it and returns the details; `remedy` is shown for unexpected exceptions."""

    name: str
    run: Callable[[], str]
    remedy: str

    def finding(self) -> Finding:
        try:
            return Finding(self.name, "good", self.run())
        except CheckFailed as failed:
            return Finding(self.name, "bad", str(failed))
        except Exception as error:  # a broken driver may raise any exception, and that is a finding
            first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            return Finding(self.name, "bad", f"{type(error).__name__}: {first_line}; {self.remedy}")


def examine_gpu() -> list[Finding]:
    """Runs the checks of the GPU, and gives one finding for each. Stops at a failure that makes later checks
    impossible."""
    problem = cuda_problem()
    if problem is not None:
        return [Finding("driver", "bad", str(problem))]
    place = torch.device("cuda", torch.cuda.current_device())
    build = "install a torch build for this GPU and driver (docs/gpu.md)"
    findings = [Check("driver", driver, build).finding(), Check("context", lambda: context(place), build).finding()]
    if findings[-1].verdict == "bad":
        return findings
    checks = (
        Check("pinned memory", lambda: pinned_memory(TorchCuda(place)), "see dmesg for what the driver refused"),
        Check("Triton", lambda: triton(place), "updates run as torch operations, slower and not exact, until it works"),
        Check("copies", lambda: copies(TorchCuda(place)), "run bench/gpu.sh links and report its file"),
        Check("NVML", lambda: nvml(place), "training works; dashboards lack the GPU's own figures"),
    )
    return [*findings, *(check.finding() for check in checks)]


def lines(findings: Sequence[Finding]) -> list[str]:
    """The findings as text, one line for each."""
    width = max(len(finding.check) for finding in findings)
    return [
        f"{'ok' if finding.verdict == 'good' else 'failed':6}  {finding.check:{width}}  {finding.detail}"
        for finding in findings
    ]


# ---- the checks


def driver() -> str:
    count = torch.cuda.device_count()
    return (
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees {count} GPU{'' if count == 1 else 's'}"
    )


def context(place: torch.device) -> str:
    """Tests whether torch can run a kernel on the GPU. Returns name, compute capability and free memory of the GPU as
    text. A torch build without code for this GPU fails here."""
    found = torch.arange(8, device=place).square().sum().item()
    if found != 140:
        raise CheckFailed(f"the GPU computes 0² + 1² + … + 7² as {found}, not 140", "the GPU is faulty: see dmesg")
    properties = torch.cuda.get_device_properties(place)
    free, total = torch.cuda.mem_get_info(place)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )


def pinned_memory(runtime: CudaRuntime) -> str:
    """Tests whether host memory can be pinned (registered), in the same way as memory for state."""
    array = np.frombuffer(mmap.mmap(-1, PINNED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    array.fill(0)
    reason = runtime.pin(array.ctypes.data, PINNED_BYTES)
    if reason:
        raise CheckFailed(
            f"{PINNED_BYTES >> 20} MiB of host memory could not be pinned ({reason})",
            "raise the limit of locked memory (ulimit -l; in a container --ulimit memlock=-1), and make sure that the "
            "container or virtual machine allows pinned memory: without it, copies are slow and do not overlap",
        )
    runtime.unpin(array.ctypes.data)
    return f"{PINNED_BYTES >> 20} MiB registered and given back"


def triton(place: torch.device) -> str:
    missing = missing_for_triton()
    if missing:
        raise CheckFailed(" ".join(missing).rstrip("."), "updates run as torch operations until this is repaired")
    update = implementation("adamw").triton
    assert update is not None
    return launch(place, importlib.import_module(update.module), update)


def launch(place: torch.device, kernels: GpuKernels, update: TritonUpdate) -> str:
    """Runs each Triton kernel of AdamW, and compares the results with the reference implementation (`oracle`)."""
    different = self_test.differences(kernels, place, update)
    if different:
        raise CheckFailed(
            f"these results differ from the reference implementation: {', '.join(different)}",
            "updates run as torch operations instead; report this, with the versions of GPU, driver, torch and Triton",
        )
    return "each kernel was compiled and launched; results equal the oracle's bit for bit"


def copies(runtime: CudaRuntime) -> str:
    """Tests whether copies in both directions run at the same time, on the lanes of the engine."""
    device = CudaDevice(runtime)
    try:
        spans = both_ways(device)
    finally:
        device.close()
    together = overlap(spans[H2D], spans[D2H])
    if together == 0.0:
        raise CheckFailed(
            "copies to and from the GPU never ran at the same time",
            "unset CUDA_DEVICE_MAX_CONNECTIONS and CUDA_LAUNCH_BLOCKING, and make sure that memory can be pinned: "
            "otherwise copies of state in both directions wait for each other, and updates take longer",
        )
    rates = ", ".join(
        f"{lane} {COPIES * COPY_BYTES / sum(end - start for start, end in found) / 1e9:.1f} GB/s"
        for lane, found in spans.items()
    )
    return f"{rates}, {together / min(map(_seconds, spans.values())):.0%} of it at once"


def both_ways(device: Device) -> dict[str, list[Span]]:
    """Starts copies in both directions at the same time, and gives the start and end of each copy, by lane."""
    there, back = device.host_buffer(COPY_BYTES), device.host_buffer(COPY_BYTES)
    places = {lane: device.alloc(COPY_BYTES) for lane in (H2D, D2H)}
    for lane in places:
        device.wait(lane, device.now())
    events: dict[str, list[Any]] = {H2D: [], D2H: []}
    for _ in range(COPIES):
        events[H2D].append(device.copy(H2D, [Copy(places[H2D], there.data_ptr(), COPY_BYTES)]))
        events[D2H].append(device.copy(D2H, [Copy(back.data_ptr(), places[D2H], COPY_BYTES)]))
    for event in itertools.chain(*events.values()):
        event.wait()
    for place in places.values():
        device.free(place)
    return {lane: [event.span() for event in found] for lane, found in events.items()}


def overlap(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds during which a span of `spans` and a span of `others` ran at the same time. Within one sequence, spans
    must not overlap."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in itertools.product(spans, others))


def _seconds(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


def nvml(place: torch.device) -> str:
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise CheckFailed(f"nvidia-ml-py cannot be imported ({error})", "pip install nvidia-ml-py") from error
    uuid = f"GPU-{torch.cuda.get_device_properties(place).uuid}"
    try:
        gpu = Gpu(pynvml, uuid)
    except DividedGpuError:
        return "this is a part of a GPU (MIG): NVML has no figures of it; training works"
    except pynvml.NVMLError as error:
        raise CheckFailed(
            f"NVML does not know {uuid} ({error})",
            "if this is a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ) from error
    try:
        busy, source = gpu.utilization_ratio(), gpu.pcie.name if gpu.pcie is not None else "none"
    finally:
        gpu.close()
    return f"utilization {'not told' if busy is None else f'{busy:.0%}'}, PCIe figures from: {source}"
