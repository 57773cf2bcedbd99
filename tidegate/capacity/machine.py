"""Description of a machine for the capacity planner: GPUs, nodes, memory, storage paths, their speeds, and the
workload."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final

from tidegate.errors import ConfigError
from tidegate.knobs.knobs import check_path_name
from tidegate.rules.rule import find
from tidegate.speeds.rate_card import RateCard

GB: Final = 10**9
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(GB|TB|PB)", re.IGNORECASE)
_BYTES_OF: Final = {"GB": 1e9, "TB": 1e12, "PB": 1e15}


@dataclass(frozen=True, kw_only=True)
class PlannedPath:
    """A storage path as input of the planner. Speeds are per node; with `all_nodes`, the total of all nodes.

    duplex: reads and writes run at full speed at the same time; otherwise they share the device. capacity_bytes: per
    node, or in total with `all_nodes`; 0 for unlimited. endurance_bytes: bytes that may be written over its life; 0 if
    not known.
    """

    name: str
    read_bytes_per_second: float
    write_bytes_per_second: float
    duplex: bool = False
    all_nodes: bool = False
    capacity_bytes: float = 0.0
    endurance_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_path_name(self.name)
        for name in ("read_bytes_per_second", "write_bytes_per_second"):
            _check_positive(f"{name} of path {self.name}", getattr(self, name))
        for name in ("capacity_bytes", "endurance_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} of path {self.name} must be a finite number of at least 0."
                )


def parse_path(text: str) -> PlannedPath:
    """Parses `NAME:READ/WRITE` (speeds in GB/s) with options: `:duplex`, `:all-nodes`, `:1.6TB` (capacity),
    `:endure=3PB` (endurance). ConfigError for any other text."""
    name, _, rest = text.partition(":")
    speeds, *options = rest.split(":")
    read, _, write = speeds.partition("/")
    form = "NAME:READ/WRITE in GB/s, as in nvme:6.9/5.3, with any of :duplex, :all-nodes, :1.6TB, :endure=3PB after it"
    try:
        reads, writes = float(read) * GB, float(write) * GB
    except ValueError as error:
        raise ConfigError(f"The path {text!r} is not {form}.") from error
    more: dict[str, Any] = {}
    for option in options:
        key, _, value = option.rpartition("=")
        size = _SIZE.fullmatch(value)
        if option in ("duplex", "all-nodes"):
            more[option.replace("-", "_")] = True
        elif size is not None and key in ("", "endure"):
            nbytes = float(size[1]) * _BYTES_OF[size[2].upper()]
            _check_positive(f"{option!r} in the path {text!r}", nbytes)
            more["endurance_bytes" if key else "capacity_bytes"] = nbytes
        else:
            raise ConfigError(f"{option!r} in the path {text!r} is unknown: the form is {form}.")
    return PlannedPath(name=name, read_bytes_per_second=reads, write_bytes_per_second=writes, **more)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The data sheet of a GPU: its memory, peak floating-point operations per second on 16-bit matrices, peak memory
    bandwidth, and the speed of its link to the host in each direction."""

    memory_bytes: float
    flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float


GPUS: Final[dict[str, Gpu]] = {
    "v100-32": Gpu(
        memory_bytes=32 * GB, flops_per_second=125e12, memory_bytes_per_second=0.9e12, link_bytes_per_second=12e9
    ),
    "a100-40": Gpu(
        memory_bytes=40 * GB, flops_per_second=312e12, memory_bytes_per_second=1.55e12, link_bytes_per_second=25e9
    ),
    "a100-80": Gpu(
        memory_bytes=80 * GB, flops_per_second=312e12, memory_bytes_per_second=2.0e12, link_bytes_per_second=25e9
    ),
    "h100-80": Gpu(
        memory_bytes=80 * GB, flops_per_second=989e12, memory_bytes_per_second=3.35e12, link_bytes_per_second=55e9
    ),
    "h200-141": Gpu(
        memory_bytes=141 * GB, flops_per_second=989e12, memory_bytes_per_second=4.8e12, link_bytes_per_second=55e9
    ),
    "l40s-48": Gpu(
        memory_bytes=48 * GB, flops_per_second=362e12, memory_bytes_per_second=0.86e12, link_bytes_per_second=25e9
    ),
    "rtx4090-24": Gpu(
        memory_bytes=24 * GB, flops_per_second=165e12, memory_bytes_per_second=1.0e12, link_bytes_per_second=25e9
    ),
}
"""GPUs by name. Values are from data sheets, without sparsity. Link speeds are from measured copies of pinned memory
(Deep Optimizer States, section 5.1; MLP-Offload, Table 1)."""


def gpu_named(name: str) -> Gpu:
    """The GPU with this name in `GPUS`; ConfigError with the known names otherwise."""
    if name not in GPUS:
        raise ConfigError(f"The GPU {name!r} is not known. Use one of: {', '.join(GPUS)}.")
    return GPUS[name]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal nodes of equal GPUs, with one rank on each GPU.

    host_memory_bytes, cpu_params_per_second, host_bytes_per_second: per node, shared by its ranks.
    host_bytes_per_second: memory bandwidth of the host, reads plus writes; updates on the CPU, copies from and to GPUs
    and storage all use it. cpu_params_per_second: speed of updates on the CPU; None if memory bandwidth limits them.
    flop_share: share of the GPU's peak that training reaches. node_link_bytes_per_second: from one GPU to the GPUs of
    its node. fabric_bytes_per_second: from one GPU to the GPUs of other nodes.
    """

    gpus: int
    nodes: int = 1
    gpu_memory_bytes: float = 80 * GB
    host_memory_bytes: float = 512 * GB
    paths: tuple[PlannedPath, ...] = ()
    h2d_bytes_per_second: float = 25e9
    d2h_bytes_per_second: float = 25e9
    device_bytes_per_second: float = 2.0e12
    flops_per_second: float = 312e12
    flop_share: float = 0.45
    host_bytes_per_second: float = 200e9
    cpu_params_per_second: float | None = None
    node_link_bytes_per_second: float = 130e9
    fabric_bytes_per_second: float = 12e9

    def __post_init__(self) -> None:
        for name, most in (("gpus", 64), ("nodes", 4096)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"{name}={value!r} is out of range: it must be from 1 to {most}.")
        for of_machine in fields(self):
            value = getattr(self, of_machine.name)
            if isinstance(value, float | int) and of_machine.name not in ("gpus", "nodes"):
                _check_positive(of_machine.name, value)
        if self.flop_share > 1:
            raise ConfigError(f"flop_share={self.flop_share!r} must be at most 1.")
        if len({path.name for path in self.paths}) != len(self.paths):
            raise ConfigError("Two storage paths have the same name: give each its own name.")

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @classmethod
    def of(cls, gpu: Gpu, **values: Any) -> Machine:
        """A machine with this GPU. `values`: fields of Machine; they override values of the GPU's data sheet."""
        from_gpu = {
            "gpu_memory_bytes": gpu.memory_bytes,
            "h2d_bytes_per_second": gpu.link_bytes_per_second,
            "d2h_bytes_per_second": gpu.link_bytes_per_second,
            "device_bytes_per_second": gpu.memory_bytes_per_second,
            "flops_per_second": gpu.flops_per_second,
        }
        return cls(**{**from_gpu, **values})

    def measured(self, card: RateCard) -> Machine:
        """A copy of this machine with measured speeds of GPU links and of updates on the CPU.

        card: the rate card that `tidegate calibrate` has measured on one node. Speeds that it lacks are not replaced.
        """
        changes = {
            name: value
            for name in ("h2d_bytes_per_second", "d2h_bytes_per_second", "cpu_params_per_second")
            if (value := getattr(card, name)) is not None
        }
        return replace(self, **changes)

    @cached_property
    def by_name(self) -> Mapping[str, PlannedPath]:
        """The storage paths by name."""
        return {path.name: path for path in self.paths}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training workload.

    sequence: tokens of a sequence. microbatch: sequences of one rank in a micro-batch. accumulation: micro-batches of
    each update. weight: dtype of weights and gradients. checkpointing: activations are kept at block boundaries and
    computed again in the backward. rule: name of the update rule. subgroup_numel: parameters of a subgroup. num_slots,
    host_slots: number of staging slots (buffers that subgroups use in turns during the update) on the GPU, and in host
    memory for each path.
    """

    sequence: int = 2048
    microbatch: int = 1
    accumulation: int = 1
    weight: str = "bfloat16"
    checkpointing: bool = True
    rule: str = "adamw"
    subgroup_numel: int = 100_000_000
    num_slots: int = 2
    host_slots: int = 3

    def __post_init__(self) -> None:
        for name in ("sequence", "microbatch", "accumulation", "subgroup_numel", "num_slots", "host_slots"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value!r} is out of range: it must be at least 1.")
        if self.weight not in AUX_BYTES:
            raise ConfigError(f"weight={self.weight!r} is unknown: use one of {', '.join(AUX_BYTES)}.")
        find(self.rule)

    @property
    def weight_bytes(self) -> int:
        return 4 if self.weight == "float32" else 2

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of state per parameter."""
        return find(self.rule).bytes_per_param + AUX_BYTES[self.weight]


AUX_BYTES: Final = {"bfloat16": 2, "float16": 4, "float32": 0}
"""Bytes per parameter of what completes a weight to fp32, by dtype of weights: for bf16 its missing 16 bits, for fp16
an fp32 master weight."""


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r} must be a positive number.")
