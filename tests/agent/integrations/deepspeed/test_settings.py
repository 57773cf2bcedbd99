"""What the "tidegate" block means, and the arithmetic at DeepSpeed's side of it; no DeepSpeed is needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.kernels.arithmetic.states import State, by_oracle
from tidegate.agent.integrations.deepspeed.enable import _swapping_disabled
from tidegate.agent.integrations.deepspeed.norm import gradient_factor
from tidegate.agent.integrations.deepspeed.settings import block_of, settings_of
from tidegate.agent.integrations.deepspeed.state import join_bf16, rounded, split_bf16
from tidegate.agent.integrations.deepspeed.support import digests, unsupported_optimizer
from tidegate.agent.integrations.deepspeed.vectors import vector_numel
from tidegate.errors import ConfigError, KnobError
from tidegate.kernels import GradDtype, WeightFormat
from tidegate.kernels.adamw.scalars import Arithmetic, scalars
from tidegate.kernels.arithmetic import oracle
from tidegate.kernels.deepspeed_adamw.scalars import scalars as cpu_adam_scalars
from tidegate.knobs.knobs import AUTO, OFF


def settings(block: dict[str, Any], **zero: Any) -> Any:
    return settings_of(block, {"zero_optimization": {"stage": 3, **zero}})


def test_deepspeeds_own_settings_are_where_knobs_begin() -> None:
    offload = {"device": "nvme", "nvme_path": "/somewhere", "ratio": 0.75}
    found = settings({}, offload_optimizer=offload, sub_group_size=5000).offload
    assert (found.stride, found.static_ratio) == (OFF, 0.25)
    assert found.paths == {"nvme": "/somewhere"}
    assert found.subgroup_numel == 5000
    untold = settings({}, offload_optimizer={"device": "cpu"}, sub_group_size=1e9).offload
    assert (untold.stride, untold.static_ratio, untold.paths) == (AUTO, 0.0, {})
    assert untold.subgroup_numel == 100_000_000


def test_the_block_wins_over_them() -> None:
    offload = {"device": "nvme", "nvme_path": "/somewhere", "ratio": 0.5}
    block = {"stride": 3, "paths": {"a": {"directory": "/a", "threads": 2}, "b": "s3://b/c"}, "subgroup_numel": 7}
    found = settings(block, offload_optimizer=offload, sub_group_size=5000).offload
    assert (found.stride, found.static_ratio, found.subgroup_numel) == (3, 0.0, 7)
    assert list(found.paths) == ["a", "b"]
    assert found.path_settings()["a"].threads == 2


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"strid": 2}, "stride"),
        ({"device": "emulated"}, "unknown key"),
        ({"daemon": "http://here"}, "no \"run\""),
        ({"fallback": "yes"}, "true or false"),
        ({"paths": ["/nvme"]}, "a block of names and directories"),
        ({"paths": {"nvme": 3}}, "paths.nvme"),
        ({"paths": {"nvme": {"folder": "/a"}}}, "directory"),
        ({"emulated": {"speed": 1}}, "update_params_per_second"),
        ({"stride": 0.5}, "stride"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_with_its_name(block: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(block)


def test_a_block_is_a_block() -> None:
    assert block_of({"zero_optimization": {}}) is None
    with pytest.raises(ConfigError, match="must be a block"):
        block_of({"tidegate": True})
    with pytest.raises(KnobError):
        settings({"tier_split": "nvme:1"})


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_weights_are_split_as_the_oracle_splits_them(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    master = torch.from_numpy(values.copy())
    weight, remainder = split_bf16(master)
    high, low = oracle.split_bf16(values)
    assert np.array_equal(weight.view(torch.int16).numpy().view(np.uint16), high)
    assert np.array_equal(remainder.numpy(), low)
    finite = ~master.isnan()
    assert torch.equal(join_bf16(weight, remainder)[finite], master[finite])
    assert torch.equal(rounded(master, torch.bfloat16).view(torch.int16), weight.view(torch.int16))


class OpOfOtherWidth:
    """DeepSpeed's op as another machine would have compiled it: the oracle's arithmetic, with other vectors."""

    def __init__(self, vector: int, tail: Arithmetic = Arithmetic.DEEPSPEED_TAIL) -> None:
        self.vector, self.tail = vector, tail

    def create_adam(self, *_: Any) -> None: ...

    def destroy_adam(self, *_: Any) -> None: ...

    def adam_update(
        self, number: int, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float, corrects: bool,
        *arrays: torch.Tensor,
    ) -> None:  # fmt: skip
        values = cpu_adam_scalars(lr, (beta1, beta2), eps, decay, step)
        body = arrays[0].numel() - arrays[0].numel() % self.vector
        for part, chosen in ((slice(body), values), (slice(body, None), replace(values, arithmetic=self.tail))):
            weight, grad, exp_avg, exp_avg_sq = (array[part].numpy() for array in arrays)
            if len(weight):
                by_oracle(State(weight, None, exp_avg, exp_avg_sq, grad), WeightFormat.F32, GradDtype.F32, chosen)


@pytest.mark.parametrize("vector", [16, 8, 4, 1, sys.maxsize])
def test_the_width_of_deepspeeds_vectors_is_found(vector: int) -> None:
    assert vector_numel(OpOfOtherWidth(vector)) == vector


def test_an_op_that_rounds_otherwise_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert vector_numel(OpOfOtherWidth(16, Arithmetic.TORCH)) == 1
    assert "not equal bit for bit" in caplog.text


@given(st.floats(1e-6, 1e6), st.sampled_from([1.0, 2.0**16, 1000.0]), st.floats(1e-3, 10.0))
def test_gradients_are_clipped_as_deepspeed_rounds(norm: float, loss_scale: float, max_norm: float) -> None:
    """ZeRO-3's own expressions, in `unscale_and_clip_grads`."""
    total_norm, grad = torch.tensor(norm, dtype=torch.float32), torch.tensor([0.3, -7e-5, 1e4])
    clip = torch.clamp(((total_norm / loss_scale) + 1e-6) / max_norm, min=1.0)
    wanted = grad.clone().mul_(1.0 / (clip * loss_scale))
    assert torch.equal(grad * gradient_factor(norm, 1.0 / loss_scale, max_norm), wanted)
    assert gradient_factor(norm, 1.0 / loss_scale, None) == 1.0 / loss_scale


@given(st.integers(1, 3000), st.sampled_from([0.9, 0.95]), st.sampled_from([0.95, 0.999]), st.booleans())
def test_scalars_depend_on_the_step_alone_and_are_near_the_exact_ones(
    step: int, beta1: float, beta2: float, several: bool
) -> None:
    settings = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}
    made = partial(cpu_adam_scalars, betas=(beta1, beta2), several_betas=several, **settings)
    for before in (step + 5, 1, step // 2 + 1):
        made(step=before)
    found = made(step=step)
    made(step=1)
    assert found == made(step=step)
    assert found.arithmetic is Arithmetic.DEEPSPEED
    near = replace(scalars(step=step, beta1=beta1, beta2=beta2, **settings), decay=1e-3 * 0.1)
    assert found.as_tuple() == pytest.approx(near.as_tuple(), rel=1e-3)


def test_optimizers_far_apart_do_not_multiply_from_the_start_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines with the same betas, one with many more steps: each step takes one more factor."""
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for step in (5000, 70):
        cpu_adam_scalars(step=step, **settings)
    factors: list[int] = []
    full = np.full

    def counted(count: int, *more: Any) -> Any:
        factors.append(count)
        return full(count, *more)

    monkeypatch.setattr(np, "full", counted)
    for more in range(1, 4):
        for step in (5000, 70):
            cpu_adam_scalars(step=step + more, **settings)
    assert factors == [2] * 12


class Commented:
    def step(self, closure: None = None) -> int:
        """One."""
        return 1  # a comment


class Plain:
    def step(self, closure: None = None) -> int:
        # another

        return 1


class Changed:
    def step(self, closure: None = None) -> int:
        return 2


class OtherSignature:
    def step(self, closure: None = None, scale: float = 1.0) -> int:
        return 1


def test_adam_that_decays_weights_as_adamw_does_is_refused() -> None:
    params = [torch.nn.Parameter(torch.zeros(2))]
    assert unsupported_optimizer(torch.optim.AdamW(params)) == unsupported_optimizer(torch.optim.Adam(params)) == []
    (why,) = unsupported_optimizer(torch.optim.Adam(params, decoupled_weight_decay=True))
    assert "use AdamW for decoupled decay" in why


class OffloadOptimizer(BaseModel):
    device: str


def test_deepspeed_that_goes_on_alone_keeps_its_state_where_it_was_told() -> None:
    zero = SimpleNamespace(offload_optimizer=OffloadOptimizer(device="nvme"))
    engine = SimpleNamespace(_config=SimpleNamespace(zero_config=zero), zero_nvme_offload_optimizer=lambda: True)
    with _swapping_disabled(engine) as restore:
        assert zero.offload_optimizer.device == "cpu"
        assert restore().device == zero.offload_optimizer.device == "nvme"


def test_a_digest_is_that_of_the_code_alone() -> None:
    assert digests(Commented) == digests(Plain)
    assert digests(Plain) != digests(Changed)
    assert digests(Plain) != digests(OtherSignature)
