"""The engine below a framework that is far ahead of its GPU: memory of gradients, when memory is taken, and when
phases begin."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agent.devices.enqueue_ahead import RunsAhead
from tests.agent.devices.fake_training import fake_training
from tests.agent.devices.test_cuda_order import SHAPES, one_step
from tests.agent.engine.test_exactness import backward, make_params, random_grads
from tests.agent.optimizer.background import update_in_background
from tests.agent.optimizer.test_optimizer import params_of
from tidegate.plan.ops import OpKind

GRAD_BYTES = 2000
"""Of what one op reads. Memory is given up on one lane while the other may just have begun its next op, and waits for
that, too: an op on each of the two lanes may come on top of what gradients may take."""


def trained(params: list[torch.nn.Parameter], steps: int = 3, **offload: Any) -> RunsAhead:
    fake = RunsAhead()
    with fake_training(fake, params, gradients="release", **offload) as training:
        for step in range(steps):
            training.train(random_grads(params, step, some=False))
        training.forward()
    return fake


@pytest.mark.parametrize("stride", ["off", 1.0], ids=["updated on the CPU", "spilled"])
def test_released_gradients_take_no_more_device_memory_than_they_may(stride: Any) -> None:
    params = params_of(*[(500,)] * 12)
    fake = trained(params, stride=stride, subgroup_numel=500, gradient_memory_bytes=4 * GRAD_BYTES)
    assert GRAD_BYTES < fake.most_framework_bytes <= 4 * GRAD_BYTES + 2 * GRAD_BYTES


def test_subgroups_of_many_gradients_take_no_more_either() -> None:
    params = params_of(*[(50,)] * 40)
    fake = trained(params, stride="off", subgroup_numel=200, gradient_memory_bytes=3000)
    assert fake.most_framework_bytes <= 3000 + 2 * 4 * 200


def test_a_gradient_larger_than_the_room_is_waited_for_and_no_more() -> None:
    params = params_of((4000,), (500,), (500,), (500,))
    fake = trained(params, stride="off", subgroup_numel=500, gradient_memory_bytes=GRAD_BYTES)
    assert fake.most_framework_bytes <= 16_000 + 2 * GRAD_BYTES


def test_gradients_that_have_room_are_not_waited_for() -> None:
    params = params_of(*[(500,)] * 6)
    fake = trained(params, steps=1, stride="off", subgroup_numel=500)
    assert fake.most_framework_bytes == 6 * GRAD_BYTES


class Unordered(RunsAhead):
    """Does not ask what orders accesses."""

    def _checked(self, look: Callable[[], None]) -> None:
        return


@pytest.mark.parametrize("stored", [False, True], ids=["in host memory", "on a path"])
@pytest.mark.parametrize(
    ("gradients", "accumulation"), [("keep", "device"), ("release", "device"), ("release", "host")]
)
@pytest.mark.parametrize("static_ratio", [0.0, 0.5])
def test_a_backward_takes_no_memory(
    static_ratio: float, gradients: Any, accumulation: Any, stored: bool, tmp_path: Path
) -> None:
    """When activations take most of the device: not for staging, not for state that moves, not for sums. With paths it
    takes some in the step in which residents leave the device: whereto is decided when the plan is made."""
    fake, params = Unordered(), params_of(*[(50,)] * 8)
    paths: dict[str, Any] = {"paths": {"nvme": tmp_path}, "host_cache": 2000} if stored else {}
    how: dict[str, Any] = {"gradients": gradients, "accumulation": accumulation, "gradient_memory_bytes": 1}
    with fake_training(
        fake, params, stride=2.0, static_ratio=static_ratio, subgroup_numel=100, **how, **paths
    ) as training:
        optimizer = training.optimizer
        ratios = (0.75, 0.75, 1.0) if stored else (0.75, 0.25, 0.5)
        for step, (stride, ratio) in enumerate(zip((1.0, 3.0, "off"), ratios, strict=True)):
            training.zero_grad()
            taken = fake.taken
            with optimizer.accumulate():
                backward(params, random_grads(params, 10 + step, some=False))
            backward(params, random_grads(params, step, some=False))
            assert fake.taken == taken, step
            optimizer.step()
            changed = {"stride": stride, "static_ratio": static_ratio and ratio}
            optimizer.apply_knobs(dataclasses.replace(optimizer.knobs, **changed))  # type: ignore[arg-type]


def test_residents_that_knobs_asked_for_and_that_no_step_needed_are_given_back() -> None:
    fake, params = RunsAhead(), params_of(*[(50,)] * 8)
    with fake_training(fake, params, stride="off", subgroup_numel=100) as training:
        optimizer, before = training.optimizer, fake.in_use_bytes()
        now = optimizer.knobs
        optimizer.apply_knobs(dataclasses.replace(now, static_ratio=1.0))
        assert fake.in_use_bytes() == before + 400 * 8
        residents, slots = optimizer.engine.memory.state_bytes_on_device(["cpu"] * 4, ["host"] * 4)
        assert (residents, slots) == (0, 0), "what was only asked for bars no other knobs"
        optimizer.apply_knobs(now)
        assert fake.in_use_bytes() == before
        optimizer.apply_knobs(dataclasses.replace(now, static_ratio=0.5))
        training.train(random_grads(params, 0, some=False))
        training.forward()
        assert optimizer.engine.memory.residence.count("device") == 2


@pytest.mark.parametrize("background", [False, True], ids=["in step()", "in the background"])
@pytest.mark.parametrize("gradients", ["keep", "release"])
def test_the_update_begins_when_the_device_has_made_the_gradients(gradients: Any, background: bool) -> None:
    params = params_of(*[(50,)] * 8)
    fake, seen = RunsAhead(), []
    with fake_training(fake, params, gradients=gradients, stride=2.0, subgroup_numel=100) as training:
        training.optimizer.observers.append(lambda result, phases: seen.append((result, phases)))
        if background:
            update_in_background(training.optimizer)
        training.train(random_grads(params, 0, some=False))
        training.optimizer.wait()
        training.zero_grad()
        training.backward(random_grads(params, 1, some=False))
        rest = fake.framework_works(seconds=0.05)
        assert rest() is None, "the framework is ahead"
        training.step()
        training.optimizer.wait()
        made_at = rest()
    result, phases = seen[1]
    backward, update = (next(s for s in reversed(phases.spans) if s.phase == name) for name in ("backward", "update"))
    assert made_at is not None
    assert update.start == backward.end == pytest.approx(made_at, abs=0.02)
    assert phases.exposed_seconds["update"] <= update.end - update.start
    norm = next(span for span in result.spans if span.kind is OpKind.NORM)
    assert norm.start > made_at - 0.02


@pytest.mark.parametrize("gradients", ["keep", "release"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_oracle(seed: int, gradients: Any) -> None:
    choices = random.Random(seed)
    settings = {"stride": choices.choice(("off", 1.0, 2.0)), "gradient_memory_bytes": choices.choice((0, 1, 400))}
    fake = RunsAhead(seed)
    with fake_training(fake, make_params(SHAPES, seed), gradients=gradients, subgroup_numel=50, **settings) as training:
        for step in range(4):
            one_step(training, choices, 100 * seed + 10 * step)
        training.optimizer.wait()
        training.forward()
    assert fake.error is None
