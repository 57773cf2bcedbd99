"""Whatever the plan, and whatever knobs change between steps: the weights equal the oracle's bit for bit."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import tidegate
from tests.agent.plain_adamw import PlainAdamW
from tests.examples import examples
from tidegate.agent.parameters.subgroups import grad_dtype_of
from tidegate.knobs.knobs import Knobs

FAST = tidegate.EmulatedRates(h2d_bytes_per_second=1e12, d2h_bytes_per_second=1e12, update_params_per_second=1e12)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = st.lists(st.integers(1, 23), min_size=0, max_size=3).map(tuple)
STRIDES = st.one_of(st.just("off"), st.floats(1, 9).map(lambda x: round(x, 2)))
KNOBS = st.tuples(STRIDES, st.floats(0, 1).map(lambda x: round(x, 2)))


SPECIAL = torch.tensor(
    [0.0, -0.0, 1e-40, -1e-45, 6e-8, 1e-30, 3.4e38, -65504.0, 1.0, 2.0**-133, 257 / 256, -1.00390625]
)
"""Signed zeros, denormals of fp32, bf16 and fp16, numbers near overflow and exact ties of 16-bit rounding."""


def make_params(shapes: list[tuple[tuple[int, ...], int]], seed: int, wide: bool = False) -> list[torch.nn.Parameter]:
    """`wide`: 16-bit weights have fp32 gradients."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(DTYPES[d])) for s, d in shapes]
    for param in params if wide else ():
        param.grad_dtype = torch.float32
    return params


def with_special_values(grads: list[torch.Tensor | None], seed: int) -> list[torch.Tensor | None]:
    """Some elements replaced by numbers that rounding, flushing or a wrong order of operations would show."""
    generator = torch.Generator().manual_seed(seed)
    for grad in grads:
        if grad is not None:
            values = SPECIAL[torch.randint(len(SPECIAL), grad.shape, generator=generator)].to(grad.dtype)
            chosen = (torch.rand(grad.shape, generator=generator) < 0.3) & values.isfinite()
            grad[chosen] = values[chosen]
    return grads


def backward(params: list[torch.nn.Parameter], grads: list[torch.Tensor | None]) -> None:
    """Makes `grads` the gradients, through autograd, so that hooks fire as in training."""
    terms = [(p * g).sum().float() for p, g in zip(params, grads, strict=True) if g is not None]
    if terms:
        torch.stack(terms).sum().backward()


def random_grads(params: list[torch.nn.Parameter], seed: int, some: bool) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    grads: list[torch.Tensor | None] = []
    for i, p in enumerate(params):
        values = (torch.randn(p.shape, generator=generator) * 3).to(p.dtype)
        grads.append(None if some and (seed + i) % 3 == 0 else values)
    return grads


@settings(max_examples=examples(150))
@given(
    shapes=st.lists(st.tuples(SHAPES, st.integers(0, 2)), min_size=1, max_size=7),
    subgroup_numel=st.integers(3, 700),
    num_slots=st.integers(1, 3),
    policy=st.sampled_from(["interleaved", "interleaved", "sequential", "twinflow"]),
    start=KNOBS,
    changes=st.lists(KNOBS, min_size=2, max_size=5),
    max_grad_norm=st.sampled_from([None, 0.7]),
    gradients=st.sampled_from(
        [("keep", 0, "device"), ("release", 0, "device"), ("release", 1, "host"), ("release", 3000, "host")]
    ),
    micro_batches=st.integers(1, 3),
    cpu_threads=st.integers(1, 4),
    wide=st.booleans(),
    special=st.booleans(),
    some=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_the_oracle_whatever_the_plan(
    shapes: list[Any],
    subgroup_numel: int,
    num_slots: int,
    policy: Any,
    start: tuple[Any, float],
    changes: list[tuple[Any, float]],
    max_grad_norm: float | None,
    gradients: tuple[Any, int, Any],
    micro_batches: int,
    cpu_threads: int,
    wide: bool,
    special: bool,
    some: bool,
    seed: int,
) -> None:
    params = make_params(shapes, seed, wide)
    half = len(params) // 2
    groups = [{"params": params[half:], "lr": 0.03, "weight_decay": 0.1}]
    if half:
        groups.insert(0, {"params": params[:half], "lr": 0.01, "betas": (0.8, 0.95)})
    ordered = [p for group in groups for p in group["params"]]  # type: ignore[attr-defined]
    # Thousands of subgroups take minutes and show nothing that hundreds do not.
    subgroup_numel = max(subgroup_numel, sum(p.numel() for p in params) // 300)
    offload = tidegate.Offload(
        stride=start[0], static_ratio=start[1], subgroup_numel=subgroup_numel, num_slots=num_slots,
        cpu_threads=cpu_threads,
        policy=policy, emulated=FAST,
        gradients=gradients[0], gradient_memory_bytes=gradients[1], accumulation=gradients[2],
    )  # fmt: skip
    with tidegate.AdamW(groups, max_grad_norm=max_grad_norm, offload=offload) as optimizer:
        plain = PlainAdamW([dict(group) for group in optimizer.param_groups], max_grad_norm)
        for step, (stride, ratio) in enumerate(changes):
            optimizer.zero_grad()
            total: list[torch.Tensor | None] = [None] * len(ordered)
            for batch in range(micro_batches):
                grads = random_grads(ordered, seed + step + 31 * batch, some)
                if special:
                    grads = with_special_values(grads, seed + step)
                wanted = [g if g is None else g.to(grad_dtype_of(p)) for p, g in zip(ordered, grads, strict=True)]
                total = [b if a is None else a if b is None else a + b for a, b in zip(total, wanted, strict=True)]
                with optimizer.accumulate() if batch < micro_batches - 1 else contextlib.nullcontext():
                    backward(ordered, grads)
            optimizer.step()
            plain.step(total)
            assert plain.same_weights(ordered)
            optimizer.apply_knobs(Knobs(stride=stride, static_ratio=ratio))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_subgroups_than_slots_and_knobs_changed_at_every_step(dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.randn(257, 31, dtype=torch.float32).to(dtype)) for _ in range(4)]
    offload = tidegate.Offload(stride=1.0, subgroup_numel=1000, num_slots=2, emulated=FAST)
    knobs = [(1.0, 0.0), (1.5, 0.5), ("off", 1.0), ("off", 0.0), (2.0, 0.25), (7.3, 0.9), (1.0, 0.0)]
    with tidegate.AdamW(params, lr=0.02, offload=offload) as optimizer:
        plain = PlainAdamW([dict(group) for group in optimizer.param_groups])
        for step, (stride, ratio) in enumerate(knobs):
            optimizer.apply_knobs(Knobs(stride=stride, static_ratio=ratio))  # type: ignore[arg-type]
            grads = random_grads(params, step, some=False)
            optimizer.zero_grad()
            backward(params, grads)
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(params)
            residents = optimizer.engine.memory.residence.count("device")
            assert residents == int(ratio * len(optimizer.engine.layouts) + 0.5)


@pytest.mark.slow  # test_torch_compatibility.py has one with more of everything
def test_agrees_with_torch_over_two_hundred_steps() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(17, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    theirs = torch.nn.Sequential(torch.nn.Linear(17, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    theirs.load_state_dict(ours.state_dict())
    reference = torch.optim.AdamW(theirs.parameters(), lr=3e-3, weight_decay=0.1)
    offload = tidegate.Offload(stride=2.5, static_ratio=0.2, subgroup_numel=100, emulated=FAST)
    with tidegate.AdamW(ours.parameters(), lr=3e-3, weight_decay=0.1, offload=offload) as optimizer:
        schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, total_steps=200) for o in (optimizer, reference)]
        for step in range(200):
            x = torch.randn(8, 17, generator=torch.Generator().manual_seed(step))
            for model, used, schedule in zip((ours, theirs), (optimizer, reference), schedules, strict=True):
                used.zero_grad()
                model(x).square().mean().backward()
                used.step()
                schedule.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-6)
