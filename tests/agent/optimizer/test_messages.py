"""What a user is told who writes something else than what was meant: the value, and what to write."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import tidegate
from tidegate.agent.devices import selection
from tidegate.errors import ConfigError, ParameterError, StorageError


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
        (None, ["paths=None is a NoneType", "{} for no storage"]),
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
    assert "/proc is on a file system where users cannot create files: give another directory" in str(error.value)


@pytest.mark.parametrize("settings", [{"paths": {"x": ""}}, {"paths": {"y": "/tmp", "x": ""}}])
def test_a_path_without_a_directory(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"^directory='' of a path names no directory: give one that exists"):
        tidegate.AdamW(parameters(), lr=1e-3, offload=tidegate.Offload(**settings))
    with pytest.raises(ConfigError, match="names no directory"):
        tidegate.PathSettings(directory="")


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
    monkeypatch.setattr(selection, "_warned", set())
    with caplog.at_level(logging.WARNING, "tidegate"):
        for _ in range(2):
            model = torch.nn.Linear(8, 8)
            with tidegate.AdamW(model.parameters(), lr=1e-3) as optimizer:
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
    said = [record.message for record in caplog.records if "emulated" in record.message]
    assert len(said) == 1
    assert "say nothing about a GPU" in said[0]


class Wrapped(torch.Tensor):
    """A tensor around another, as libraries for other number formats have: it has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return Wrapped(args[0].inner)


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (Wrapped(torch.zeros(3)), ["Parameter 0 is a Wrapped", "no memory of its own", "another optimizer"]),
        (torch.zeros(3, dtype=torch.float64), ["torch.float64", "float32, bfloat16, float16", "model.float()"]),
        (torch.zeros(3, dtype=torch.complex64), ["torch.complex64", "another optimizer"]),
        (torch.eye(3).to_sparse(), ["torch.sparse_coo", "to_dense()"]),
    ],
)
def test_a_parameter_that_cannot_be_offloaded(param: torch.Tensor, words: list[str]) -> None:
    """As in a script that trains in double precision, which torch's optimizers take."""
    with pytest.raises(ParameterError) as error:
        tidegate.AdamW([torch.nn.Parameter(param)], lr=1e-3)
    for word in words:
        assert word in str(error.value)


def test_param_groups_that_were_made_for_adam() -> None:
    """What docs/frameworks.md writes for a script with `torch.optim.Adam`, whose weight decay is 0 by default."""
    torch.manual_seed(0)
    ours, theirs = [[torch.nn.Parameter(torch.full((64,), 0.5))] for _ in range(2)]
    optimizer = tidegate.AdamW(ours, lr=1e-2, weight_decay=0.0, decoupled=False)
    plain = torch.optim.Adam(theirs, lr=1e-2)
    for _ in range(3):
        ours[0].grad = torch.randn(64)
        theirs[0].grad = ours[0].grad.clone()
        optimizer.step()
        plain.step()
    optimizer.close()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-6)
