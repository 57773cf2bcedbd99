"""What the capacity planner is asked on its page, as one value: of the address, for the form, and for the planner."""

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
"""Answers that are kept: a form asks the same thing again and again."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The form's fields. GB are 10⁹ bytes; gpu_memory 0 is what the kind of GPU has; paths: a line for each."""

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
        """Of an address; what it does not say, or says wrongly, is as it is at first."""
        first, given = asdict(cls()), dict[str, Any]()
        for name, text in query.items():
            if name in first:
                with contextlib.suppress(ValueError):
                    given[name] = text == "True" if isinstance(first[name], bool) else type(first[name])(text)
        return cls(**{name: value for name, value in given.items() if not _is_nan(value)})

    def query(self) -> dict[str, str]:
        """For the address: what differs from the form as it is at first."""
        first, now = asdict(type(self)()), asdict(self)
        return {name: str(value) for name, value in now.items() if value != first[name]}

    def machine(self) -> Machine:
        """ConfigError, as a sentence, for what cannot be."""
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
    """The plan. shape: of a model that has no name here. ConfigError for what cannot be."""
    return plan_capacity(shape or model_named(asked.model), asked.machine(), asked.work())


@lru_cache(maxsize=KEPT)
def changes(asked: Question, shape: ModelShape | None = None) -> tuple[Change, ...]:
    """What would help most; takes seconds."""
    return best_changes(answer(asked, shape))


def names() -> list[str]:
    """Models that have a name, by size."""
    return sorted(MODELS, key=lambda name: MODELS[name].params)
