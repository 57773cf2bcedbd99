"""Rules that are a file of the core and a folder of the kernels: they train, and nothing else knows of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tidegate
from tests import forked
from tests.rules.toys import make_known
from tests.services import ROOT, daemon_process, until
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.cli.main import app
from tidegate.kernels.arithmetic import oracle
from tidegate.knobs.knobs import Knobs, specs_for

make_known()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = ((30, 17), (7, 11), (41, 3))
"""The subgroups that are made of them have odd sizes, so that arrays of 16 bits end at odd places."""
KNOBS = (
    {"stride": 2.0}, {"stride": "off", "static_ratio": 0.5}, {"stride": 1.0, "tier_split": "a:1,b:3"},
    {"host_cache": 100_000, "order": "alternate"}, {"host_cache": 0, "static_ratio": 0.0},
)  # fmt: skip


def params_of(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    made = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for shape in SHAPES]


def grads_of(step: int, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=made).to(p.dtype) for p in params]


def build(params: list[torch.nn.Parameter], rule: str, folder: Path | None, **given: Any) -> Optimizer:
    paths = {} if folder is None else {"a": folder / "a", "b": folder / "b"}
    for path in paths.values():
        path.mkdir(parents=True, exist_ok=True)
    on_paths = {"paths": paths, "tier_split": "a:2,b:1", "host_cache": 0} if paths else {}
    offload = tidegate.Offload(subgroup_numel=111, cpu_threads=1, stride=2.0, **on_paths)
    return tidegate.Optimizer(params, rule, offload=offload, **given)


def train(optimizer: Optimizer, params: list[torch.nn.Parameter], steps: range, knobs: bool = False) -> None:
    for step in steps:
        if knobs:
            specs = specs_for(tuple(optimizer.engine.host_slots))
            optimizer.apply_knobs(Knobs().changed(KNOBS[step % len(KNOBS)], specs))
        for param, grad in zip(params, grads_of(step, params), strict=True):
            (param * grad).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Plain:
    """The rule in a plain loop over fp32 weights, rounded to the dtype of the parameters after each step."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.dtype = params[0].dtype
        self.masters = [p.detach().float().clone() for p in params]
        self.velocities = [torch.zeros_like(p.detach(), dtype=torch.bfloat16) for p in params]

    def sgd_plain(self, grads: list[torch.Tensor], lr: float = 0.1) -> None:
        self.masters = [p - lr * g.float() for p, g in zip(self.masters, grads, strict=True)]

    def momentum(self, grads: list[torch.Tensor], lr: float = 0.1) -> None:
        pairs = zip(self.velocities, grads, strict=True)
        self.velocities = [(v.float() * 0.9 + g.float()).bfloat16() for v, g in pairs]
        self.masters = [p - v.float() * lr for p, v in zip(self.masters, self.velocities, strict=True)]

    def weights(self) -> list[torch.Tensor]:
        if self.dtype != torch.bfloat16:
            return [p.to(self.dtype) for p in self.masters]
        halves = [oracle.to_bf16(p.numpy().reshape(-1)).view("int16") for p in self.masters]
        return [
            torch.from_numpy(h).view(torch.bfloat16).view(p.shape) for h, p in zip(halves, self.masters, strict=True)
        ]


def check(params: list[torch.nn.Parameter], plain: Plain) -> None:
    for ours, theirs in zip(params, plain.weights(), strict=True):
        assert torch.equal(ours.detach(), theirs)


@DTYPES
@pytest.mark.parametrize("rule", ["sgd_plain", "momentum"])
@pytest.mark.parametrize("on_paths", [False, True])
def test_they_train_as_a_plain_loop_does_whatever_the_knobs(
    tmp_path: Path, rule: str, dtype: torch.dtype, on_paths: bool
) -> None:
    params = params_of(dtype)
    plain = Plain(params)
    with build(params, rule, tmp_path if on_paths else None, lr=0.1) as optimizer:
        for step in range(8):
            train(optimizer, params, range(step, step + 1), knobs=on_paths)
            getattr(plain, rule)(grads_of(step, params))
            check(params, plain)
        state = optimizer.state_dict()["state"][0]
        aux = {torch.float32: (), torch.bfloat16: ("remainder",), torch.float16: ("master",)}[dtype]
        assert set(state) == {"step", *(("velocity", "largest") if rule == "momentum" else ()), *aux}
        if rule == "momentum":
            assert state["velocity"].dtype == torch.bfloat16
            assert torch.equal(state["velocity"], plain.velocities[0])
            assert optimizer.state[params[1]]["velocity"].dtype == torch.bfloat16


@DTYPES
@pytest.mark.parametrize("rule", ["sgd_plain", "momentum"])
@pytest.mark.parametrize("way", ["checkpoint", "background", "state_dict"])
def test_they_go_on_from_what_was_saved(tmp_path: Path, rule: str, dtype: torch.dtype, way: str) -> None:
    params = params_of(dtype)
    plain = Plain(params)
    with build(params, rule, tmp_path / "first", lr=0.1) as optimizer:
        train(optimizer, params, range(3))
        saved = [p.detach().clone() for p in params]
        state = optimizer.state_dict()
        if way == "checkpoint":
            optimizer.save_checkpoint(tmp_path / "saved")
        elif way == "background":
            optimizer.begin_checkpoint(tmp_path / "saved").result()
        train(optimizer, params, range(3, 5))
    again = [torch.nn.Parameter(weight) for weight in saved]
    with build(again, rule, tmp_path / "second", lr=0.1) as optimizer:
        if way == "state_dict":
            optimizer.load_state_dict(state)
        else:
            assert tidegate.find_damaged_checkpoints(tmp_path / "saved") == []
            optimizer.load_checkpoint(tmp_path / "saved")
        assert (optimizer.num_steps, optimizer.steps) == (3, (3, 3, 3))
        train(optimizer, again, range(3, 5))
    for step in range(5):
        getattr(plain, rule)(grads_of(step, params))
    check(params, plain)
    check(again, plain)


def test_a_checkpoint_of_another_rule_is_refused(tmp_path: Path) -> None:
    params = params_of(torch.float32)
    with build(params, "momentum", None) as optimizer:
        train(optimizer, params, range(1))
        optimizer.save_checkpoint(tmp_path / "saved")
    with tidegate.AdamW(params) as optimizer, pytest.raises(tidegate.ForeignState, match=r"momentum \(velocity:"):
        optimizer.load_checkpoint(tmp_path / "saved")


def test_max_grad_norm_and_maximize_are_of_every_rule() -> None:
    params = [torch.nn.Parameter(torch.zeros(2, 2))]
    with tidegate.Optimizer(params, "sgd_plain", lr=1.0, max_grad_norm=1.0, maximize=True) as optimizer:
        params[0].grad = torch.full((2, 2), 3.0)
        optimizer.step()
    assert torch.allclose(params[0], torch.full((2, 2), 0.5))


@pytest.mark.timeout(120)
@DTYPES
def test_previews_are_made_for_a_run(tmp_path: Path, dtype: torch.dtype) -> None:
    params = params_of(dtype)
    with daemon_process(tmp_path / "state") as daemon, build(params, "sgd_plain", tmp_path, lr=0.1) as optimizer:
        tidegate.attach(optimizer, run="toy", daemon=daemon.url, token=daemon.token("agent"))
        steps = iter(range(10_000))

        def dry_run() -> dict[str, Any]:
            train(optimizer, params, range(next(steps), next(steps) + 5))
            command = ["knobs", "set", "--run", "toy", "--daemon", daemon.url, "stride=3", "--dry-run", "--json"]
            done = forked.run(
                [sys.executable, "-m", "tidegate", *command],
                cwd=ROOT, env={**os.environ, "TIDEGATE_STATE_DIR": str(daemon.state)}, timeout=60,
            )  # fmt: skip
            assert "Traceback" not in done.stderr
            found: dict[str, Any] = json.loads(done.stdout)
            return found

        until(lambda: dry_run()["predicted_after"], "rates of a few steps")
        seen = dry_run()
        assert seen["no_prediction"] == ""
        assert (seen["predicted_after"]["lane_bytes"].get("a:read", 0) > 0) == (dtype != torch.float32)


@pytest.mark.parametrize(("rule", "nbytes"), [("sgd_plain", 2), ("momentum", 8), ("adamw", 10)])
def test_the_capacity_planner_counts_the_bytes_of_the_rule(rule: str, nbytes: int) -> None:
    def plan(*more: str) -> str:
        words = ["plan", "--model", "llama-7b", "--path", "nvme:6/5", "--no-advice", "--rule", rule, *more]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return done.output

    found = json.loads(plan("--json"))
    assert sum(found["state_bytes"].values()) == pytest.approx(nbytes * found["model"]["params"], rel=0.01)
    assert f"{nbytes} bytes of state each" in plan()
    assert (f'rule="{rule}"' in plan()) == (rule != "adamw")


def test_the_capacity_planner_refuses_an_unknown_rule() -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "llama-7b", "--rule", "lion"])
    assert done.exit_code != 0
    assert "no update rule 'lion'" in str(done.exception)
