"""Clean-up that fails in one place goes on in all others, and tells of the first failure."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import tidegate
from tidegate.agent.cleanup import close_all


def failing(name: str) -> Any:
    def fail() -> NoReturn:
        raise OSError(f"{name} failed")

    return fail


def test_each_step_is_taken_and_the_first_error_raised(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[int] = []
    with caplog.at_level(logging.WARNING, "tidegate"), pytest.raises(OSError, match="the first failed"):
        close_all(lambda: taken.append(1), failing("the first"), lambda: taken.append(2), failing("the second"))
    assert taken == [1, 2]
    assert "the second failed" in caplog.text


def test_paths_and_device_are_closed_when_memory_cannot_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = tidegate.AdamW([param], offload=tidegate.Offload(paths={"nvme": tmp_path}, host_cache=0))
    param.grad = torch.ones(100)
    optimizer.step()
    engine, closed = optimizer.engine, list[str]()
    close_device = engine.device.close
    monkeypatch.setattr(engine.memory, "close", failing("memory"))
    monkeypatch.setattr(engine.device, "close", lambda: (closed.append("device"), close_device()))
    with pytest.raises(OSError, match="memory failed"):
        optimizer.close()
    assert closed == ["device"]
    assert not list(tmp_path.iterdir()), "nothing is left on the path"
    tidegate.AdamW([param]).close()  # it is free for another


def test_all_sums_on_the_host_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    class Failing:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)
            raise OSError(f"copy {self.number} failed")

    offload = tidegate.Offload(gradients="release", accumulation="host")
    optimizer = tidegate.AdamW([torch.nn.Parameter(torch.ones(10))], offload=offload)
    sums = optimizer.engine.gradients.sums
    assert sums is not None
    monkeypatch.setattr(sums, "_returning", {0: Failing(0), 1: Failing(1)})
    with pytest.raises(OSError, match="copy 0 failed"):
        optimizer.close()
    assert waited == [0, 1]
