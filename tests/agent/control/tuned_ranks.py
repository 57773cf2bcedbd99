"""One rank of a real torchrun job, for test_tuned_ranks: what it wants and can have is told, the rest is real."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import tidegate
from tidegate.agent.control.attachment import Attachment
from tidegate.errors import ConfigError, MemoryBudgetError
from tidegate.knobs.knobs import Knobs
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.tuner.consensus import RankPredictions, Setting
from tidegate.tuner.tuner import Move

WANTED = {0: 4.0, 1: 3.0}
"""What each rank's model asks for."""
SECONDS = {2.0: (1.0, 1.2), 3.0: (0.9, 0.8), 4.0: (0.1, math.inf), 8.0: (0.5, 0.5)}
"""What each rank predicts of a stride: rank 1 cannot have 4, and of 3 the slower rank promises 25 %."""
MOST_STEPS = 40
"""More than a comparison takes."""


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(4)))
    offload = tidegate.Offload(stride="auto", subgroup_numel=400, cpu_threads=1)
    with tidegate.AdamW(model.parameters(), lr=0.01, offload=offload) as optimizer:
        attachment = tidegate.attach(optimizer, model, run="tuned")
        tell(attachment, rank)
        strides: list[float] = []
        heard: list[float] = []
        tuner = attachment.tuning.tuner
        observe = tuner.observe

        def noted(ran: EffectiveKnobs, seconds: float) -> None:
            heard.append(seconds)
            observe(ran, seconds)

        tuner.observe = noted  # type: ignore[method-assign]

        def step() -> None:
            strides.append(float(optimizer.engine.effective.stride))
            model(torch.randn(2, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        while tuner._trial is None and len(strides) < MOST_STEPS:
            step()
        while tuner._trial is not None and len(strides) < MOST_STEPS:
            step()
        compared = len(strides)
        WANTED.update({0: 8.0, 1: 8.0})
        refuse_on_last(optimizer, rank)
        tuner._recent.clear()
        tuner._discard_findings()
        for _ in range(8):
            step()
        (folder / f"rank-{rank}").write_text(
            json.dumps({"strides": strides, "heard": heard, "said": tuner.last_verdict, "compared": compared})
        )
        dist.barrier()
    dist.destroy_process_group()


def tell(attachment: Attachment, rank: int) -> None:
    tuning = attachment.tuning

    def wanted() -> Move | None:
        now = tuning._current
        if rank == 1 and WANTED[1] == 8.0:
            raise RuntimeError("a model that fails on one rank holds up no other")
        return (
            Move(EffectiveKnobs(WANTED[rank], now.static_ratio), 0.5) if now.stride == 2.0 or WANTED[0] == 8.0 else None
        )

    def judge(settings: Sequence[Setting], _: int) -> RankPredictions:
        return RankPredictions(
            SECONDS[float(tuning._current.stride)][rank], tuple(SECONDS[float(s.stride)][rank] for s in settings)
        )

    tuning._best_candidate = wanted  # type: ignore[method-assign]
    tuning._judge = judge  # type: ignore[method-assign]


def refuse_on_last(optimizer: tidegate.AdamW, rank: int) -> None:
    """Memory is gone by the time that it is applied, on rank 1 alone."""
    check = optimizer.check_knobs

    def refused(knobs: Knobs) -> None:
        if rank == 1 and optimizer._auto.stride == 8.0:
            raise MemoryBudgetError("there was room a moment ago", 1, 0)
        check(knobs)

    optimizer.check_knobs = refused  # type: ignore[method-assign]
    assert issubclass(MemoryBudgetError, ConfigError)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
