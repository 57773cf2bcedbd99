"""Where the demo trains: model and batches go to the GPU where there is one, and the reason is said where not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

import tidegate
from tidegate.agent.devices.cuda_problem import CudaProblem
from tidegate.demo import DemoOptions, devices, session
from tidegate.demo.devices import DemoDevices, choose_devices
from tidegate.demo.session import Session

ELSEWHERE = torch.device("meta")
"""Stands for the GPU: a device that no tensor is on unless somebody moves it there."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device.index}")


@pytest.mark.usefixtures("gpu")
def test_the_gpu_is_taken_where_there_is_one_and_the_emulated_device_when_asked() -> None:
    taken = choose_devices(emulated=False)
    assert (taken.device, taken.offload, taken.why_no_gpu) == (torch.device("cuda", 1), "auto", "")
    assert taken.name == "GPU number 1 (cuda:1)"
    asked = choose_devices(emulated=True)
    assert (asked.device, asked.offload) == (torch.device("cpu"), "emulated")
    assert "--emulated" in asked.why_no_gpu


def test_without_cuda_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_problem", lambda: CudaProblem("the driver is too old", "install a newer one"))
    found = choose_devices(emulated=False)
    assert (found.device, found.offload) == (torch.device("cpu"), "auto")
    assert "the driver is too old" in found.why_no_gpu


def test_the_reason_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    demo = _session(monkeypatch, DemoDevices(torch.device("cpu"), why_no_gpu="the driver is too old"))
    demo.console = Console(soft_wrap=True)
    model = torch.nn.Linear(2, 2)
    optimizer: Any = SimpleNamespace(
        engine=SimpleNamespace(layouts=[0], store=None), device=SimpleNamespace(kind="emulated")
    )
    demo._announce(model, optimizer, cast(Any, SimpleNamespace(metrics_address="here:1")), "http://there", None)
    said = capsys.readouterr().out
    assert "emulated" in said
    assert "the driver is too old" in said


def test_the_model_and_its_optimizer_are_built_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: dict[str, Any] = {}

    def adamw(params: Any, offload: tidegate.Offload, **settings: Any) -> object:
        built.update(places={param.device for param in params}, offload=offload)
        return object()

    monkeypatch.setattr(tidegate, "AdamW", adamw, raising=False)
    demo = _session(monkeypatch, DemoDevices(ELSEWHERE))
    _, model = demo._build({"nvme": tmp_path})
    assert built["places"] == {ELSEWHERE}
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {ELSEWHERE}
    assert built["offload"].device == "auto"
    demo = _session(monkeypatch, DemoDevices(torch.device("cpu"), "emulated", "asked for"))
    demo._build({"nvme": tmp_path})
    assert built["places"] == {torch.device("cpu")}
    assert built["offload"].device == "emulated"


class Strict(torch.nn.Module):
    """Refuses batches that are not where its buffer is, as a model on a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("here", torch.zeros(1, device=ELSEWHERE))
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        for given in (input_ids, labels):
            if given.device != self.here.device:
                raise RuntimeError(f"Expected all tensors on {self.here.device}, found {given.device}")
        return SimpleNamespace(loss=self.weight.sum())


class Optimizer(torch.optim.SGD):
    """What the training calls of ours, on top of torch's."""

    observers: list[Any]
    logged: dict[str, Any]

    def log(self, **values: Any) -> None:
        self.logged = values


def test_batches_go_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = _session(monkeypatch, DemoDevices(ELSEWHERE), steps=2)
    monkeypatch.setattr(demo, "_show_progress", lambda *_: None)
    losses: list[float] = []
    summary: Any = SimpleNamespace(record_plan=None, record_step=lambda loss, tokens: losses.append(loss))
    model = Strict()
    optimizer = Optimizer(model.parameters(), lr=0.1)
    optimizer.observers = []
    demo._train(model, cast(Any, optimizer), cast(Any, None), torch.zeros(1000, dtype=torch.uint8), summary)
    assert len(losses) == 2
    assert all(isinstance(loss, float) for loss in (*losses, optimizer.logged["loss"]))


def _session(monkeypatch: pytest.MonkeyPatch, taken: DemoDevices, **options: Any) -> Session:
    monkeypatch.setattr(session, "choose_devices", lambda emulated: taken)
    return Session(DemoOptions(headless=True, **options))
