"""What launchers say of a host's ranks: ports that do not collide, cores that are shared."""

from __future__ import annotations

import os

import pytest
import torch

import tidegate
from tests.services import free_port
from tidegate.agent.ranks import cpu_lane_threads, local_rank
from tidegate.errors import ConfigError


@pytest.mark.parametrize(
    ("bound", "cores", "ranks", "threads"),
    [(8, 8, None, 7), (8, 8, "1", 7), (8, 8, "4", 4), (8, 8, "16", 1), (1, 8, None, 1), (4, 8, "2", 3)],
    ids=["no launcher", "one rank", "four", "more than cores", "bound to one", "bound to some"],
)
def test_each_training_thread_has_a_core_left(
    bound: int, cores: int, ranks: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cpu_lane_threads() == threads


def test_the_second_rank_of_a_host_takes_the_next_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    port = free_port()
    model = torch.nn.Linear(4, 4)
    with tidegate.AdamW(model.parameters()) as optimizer:
        assert tidegate.attach(optimizer, model, run="r", metrics_port=port).metrics_address == f"127.0.0.1:{port + 1}"


def test_a_rank_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 'first', a whole number is needed"):
        local_rank()
