"""What a user is told who writes something else than what was meant: the value, and what to write."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import tidegate
from tidegate.agent.devices import choose
from tidegate.errors import ConfigError, StorageError


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(64))]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stride": 2}, ["offload={'stride': 2} is a dict", "tidegate.Offload(stride=2)"]),
        ("nvme", ["offload='nvme' is a str", "tidegate.Offload(paths={'nvme': '/nvme/tide'})"]),
        (True, ["offload=True is a bool", "leave it out", "tidegate.Offload()"]),
        (False, ["offload=False is a bool", "torch.optim.AdamW"]),
    ],
)
def test_offload_is_no_offload(given: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        tidegate.AdamW(parameters(), lr=1e-3, offload=given)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ("/data", ["paths='/data' has no name", "paths={'data': '/data'}"]),
        (Path("/nvme/Tide 1"), ["has no name", "paths={'path': '/nvme/Tide 1'}"]),
        (["/data"], ["paths=['/data'] is a list", "{'nvme': '/nvme/tide'}"]),
        ({"x": 3}, ["paths={'x': 3}", "a directory"]),
    ],
)
def test_paths_are_no_mapping(paths: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        tidegate.Offload(paths=paths)
    for word in words:
        assert word in str(error.value)


def test_a_directory_that_is_there_and_takes_no_files() -> None:
    with pytest.raises(StorageError) as error:
        tidegate.AdamW(parameters(), lr=1e-3, offload=tidegate.Offload(paths={"x": "/proc"}))
    assert "does not exist" not in str(error.value)
    assert "/proc is on a file system that holds no files of users: give another directory" in str(error.value)


def test_an_optimizer_in_a_wrapper_is_attached() -> None:
    optimizer = tidegate.AdamW(parameters(), lr=1e-3)
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert wrapped is not optimizer
    with tidegate.attach(wrapped, run="wrapped"):
        assert optimizer.attachment is not None
    optimizer.close()


def test_an_optimizer_of_somebody_else_is_not() -> None:
    with pytest.raises(
        ConfigError, match=r"attach\(\) was given an AdamW of torch\.optim.*: give it a tidegate\.AdamW"
    ):
        tidegate.attach(torch.optim.AdamW(parameters()), run="other")  # type: ignore[arg-type]


def test_attachments_and_checkpoints_are_shown_in_a_line(tmp_path: Path) -> None:
    optimizer = tidegate.AdamW(parameters(), lr=1e-3)
    attachment = tidegate.attach(optimizer, run="llama")
    assert repr(attachment) == (
        f"Attachment(run='llama', rank 0 of 1, generation 0, metrics at {attachment.metrics_address}, no daemon)"
    )
    attachment.close()
    assert repr(attachment) == "Attachment(run='llama', rank 0 of 1, closed)"
    optimizer.save_checkpoint(tmp_path)
    (found,) = tidegate.find_checkpoints(tmp_path)
    assert repr(found) == f"Checkpoint({found.directory}, step 0, rank 0)"
    optimizer.close()


def test_that_the_device_is_emulated_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_warned", set())
    with caplog.at_level(logging.WARNING, "tidegate"):
        for _ in range(2):
            model = torch.nn.Linear(8, 8)
            with tidegate.AdamW(model.parameters(), lr=1e-3) as optimizer:
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
    said = [record.message for record in caplog.records if "emulated" in record.message]
    assert len(said) == 1
    assert "no claim about a GPU" in said[0]
