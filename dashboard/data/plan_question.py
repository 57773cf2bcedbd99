"""The fields of the capacity planner's page as one value, `Question`. It can be read from the query of a URL, written
as such a query, and converted to the planner's input."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, Self

from tidegate.capacity.machine import GB, Machine, Workload, gpu_named, parse_path
from tidegate.capacity.model_shapes import MODELS, ModelShape, model_named
from tidegate.capacity.planner import CapacityPlan, plan_capacity
from tidegate.capacity.recommendations import Change, best_changes

KEPT: Final = 64
"""Number of cached answers. The cache is needed because each refresh of the form requests the same answer again."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The fields of the form on the page Plan. Sizes are in GB (10⁹ bytes), speeds in GB/s. gpu_memory: memory of each
    GPU; 0: as much as the kind of GPU named in `gpu` has. paths: one line for each storage path, as in `nvme:6.9/5.3`
    (name, and its speeds for reads and writes)."""

    model: str = "llama-70b"
    gpu: str = "a100-80"
    gpus: int = 8
    nodes: int = 1
    gpu_memory: float = 0.0
    host_memory: float = 1024.0
    paths: str = "nvme:6.9/5.3"
    sequence: int = 4096
    microbatch: int = 1
    accumulation: int = 1
    weight: str = "bfloat16"
    checkpointing: bool = True
    host_bandwidth: float = 200.0
    fabric: float = 12.0
    flop_share: float = 0.45

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> Self:
        """The question from the query of a URL; fields that are absent or invalid have their defaults."""
        first, given = asdict(cls()), dict[str, Any]()
        for name, text in query.items():
            if name in first:
                with contextlib.suppress(ValueError):
                    given[name] = text == "True" if isinstance(first[name], bool) else type(first[name])(text)
        return cls(**{name: value for name, value in given.items() if not _is_nan(value)})

    def query(self) -> dict[str, str]:
        """The fields that differ from their defaults, for the query of a URL."""
        first, now = asdict(type(self)()), asdict(self)
        return {name: str(value) for name, value in now.items() if value != first[name]}

    def machine(self) -> Machine:
        """The machine of the question as the planner's input. ConfigError with a sentence for invalid input."""
        kind = gpu_named(self.gpu)
        lines = [line.strip() for line in self.paths.splitlines() if line.strip()]
        return Machine.of(
            kind,
            gpus=self.gpus,
            nodes=self.nodes,
            gpu_memory_bytes=self.gpu_memory * GB or kind.memory_bytes,
            host_memory_bytes=self.host_memory * GB,
            paths=tuple(map(parse_path, lines)),
            host_bytes_per_second=self.host_bandwidth * GB,
            fabric_bytes_per_second=self.fabric * GB,
            flop_share=self.flop_share,
        )

    def work(self) -> Workload:
        names = ("sequence", "microbatch", "accumulation", "weight", "checkpointing")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Workload(**given)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


@lru_cache(maxsize=KEPT)
def answer(asked: Question, shape: ModelShape | None = None) -> CapacityPlan:
    """The planner's answer to the question. shape: the shape of an uploaded model, used instead of the named model.
    ConfigError for invalid input."""
    return plan_capacity(shape or model_named(asked.model), asked.machine(), asked.work())


@lru_cache(maxsize=KEPT)
def changes(asked: Question, shape: ModelShape | None = None) -> tuple[Change, ...]:
    """Changes of the machine or of the training with which an iteration is fastest, or, if the model does not fit, with
    which it fits. The computation takes seconds."""
    return best_changes(answer(asked, shape))


def names() -> list[str]:
    """The names of known models, smallest first."""
    return sorted(MODELS, key=lambda name: MODELS[name].params)
