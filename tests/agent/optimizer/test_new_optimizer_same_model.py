"""A new optimizer for parameters that belong to an earlier one: as torch's users do it all day."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.background import update_in_background
from tests.agent.optimizer.test_optimizer import MIXED, params_of, run_steps
from tests.agent.plain_adamw import PlainAdamW
from tidegate.errors import EngineError, ParameterError

RELEASING = tidegate.Offload(stride=2.0, subgroup_numel=50, emulated=FAST, gradients="release")
SHAPES = ((40, 3), (77,))


def steps_are_exact(optimizer: tidegate.AdamW, params: list[torch.nn.Parameter], steps: int = 2) -> None:
    plain = PlainAdamW([dict(group) for group in optimizer.param_groups])
    for step in range(steps):
        grads = random_grads(params, 70 + step, some=False)
        optimizer.zero_grad()
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def test_the_same_line_again_closes_the_earlier_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    params = params_of(*SHAPES)
    optimizer = earlier = tidegate.AdamW(params, offload=MIXED)
    run_steps(optimizer, params, 0, 2)
    with caplog.at_level(logging.WARNING, "tidegate"):
        optimizer = tidegate.AdamW(params, offload=MIXED)
    with optimizer:
        (said,) = [record.getMessage() for record in caplog.records]
        assert "2 of its parameters" in said
        assert "closed" in said
        steps_are_exact(optimizer, params)
        with pytest.raises(EngineError, match=r"another optimizer took its parameters"):
            earlier.step()
        earlier.close()
        run_steps(optimizer, params, 2, 1)


def test_an_earlier_one_that_only_cycles_hold_is_collected_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    params = params_of(*SHAPES)
    earlier = tidegate.AdamW(params, offload=MIXED)
    run_steps(earlier, params, 0, 2)
    seen = weakref.ref(earlier)
    cycle: dict[str, Any] = {"trainer": earlier}
    cycle["self"] = cycle
    gc.disable()
    try:
        del earlier, cycle
        assert seen() is not None
        with caplog.at_level(logging.WARNING, "tidegate"), tidegate.AdamW(params, offload=MIXED) as optimizer:
            assert seen() is None
            steps_are_exact(optimizer, params)
    finally:
        gc.enable()
    assert not caplog.records


def test_ten_optimizers_in_a_loop_leave_neither_threads_nor_hooks_behind(tmp_path: Path) -> None:
    params = params_of(*SHAPES)
    offload = tidegate.Offload(subgroup_numel=50, emulated=FAST, paths={"disk": tmp_path}, host_cache=0)
    optimizer = tidegate.AdamW(params, offload=offload)
    run_steps(optimizer, params, 0, 1)
    before = threading.active_count(), len(os.listdir("/proc/self/fd")), len(hooks_of(params[0]))
    for _ in range(9):
        optimizer = tidegate.AdamW(params, offload=offload)
        run_steps(optimizer, params, 0, 1)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd")), len(hooks_of(params[0]))) == before
    optimizer.close()


def test_optimizers_that_nobody_closed_leave_no_hooks_on_the_parameters() -> None:
    params = params_of(*SHAPES)
    for _ in range(3):
        run_steps(tidegate.AdamW(params, offload=MIXED), params, 0, 1)
        gc.collect()
    assert not hooks_of(params[0])


def hooks_of(param: torch.nn.Parameter) -> dict[int, Any]:
    return param._post_accumulate_grad_hooks or {}


def test_an_update_that_goes_on_in_the_background_is_waited_for() -> None:
    params = params_of(*SHAPES)
    earlier = tidegate.AdamW(params, offload=MIXED)
    plain = PlainAdamW([dict(group) for group in earlier.param_groups])
    update_in_background(earlier)
    grads = random_grads(params, 0, some=False)
    backward(params, grads)
    earlier.step()
    with tidegate.AdamW(params, offload=MIXED):
        plain.step(grads)
        assert plain.same_weights(params)


def test_gradients_that_are_released_already_are_not_lost() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=RELEASING) as earlier:
        backward(params, random_grads(params, 0, some=False))
        with pytest.raises(ParameterError, match=r"Parameter 0 .*in the middle of a step.*zero_grad\(\).*close\(\)"):
            tidegate.AdamW(params, offload=MIXED)
        earlier.step()
        with tidegate.AdamW(params, offload=MIXED) as optimizer:
            steps_are_exact(optimizer, params)


def test_inside_its_own_step_it_is_refused() -> None:
    params = params_of(*SHAPES)
    said: list[str] = []

    def build(_: int) -> None:
        with pytest.raises(ParameterError, match="in the middle of a step") as refused:
            tidegate.AdamW(params, offload=MIXED)
        said.append(str(refused.value))

    with tidegate.AdamW(params, offload=MIXED) as earlier:
        earlier.boundaries.append(build)
        run_steps(earlier, params, 0, 1)
        assert len(said) == 1


def test_parameters_that_cannot_be_taken_leave_the_earlier_one_alone() -> None:
    params = params_of(*SHAPES)
    wrong = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with tidegate.AdamW(params, offload=MIXED) as earlier:
        with pytest.raises(ParameterError, match="float64"):
            tidegate.AdamW([*params, wrong], offload=MIXED)
        run_steps(earlier, params, 0, 1)


def test_a_run_that_is_attached_ends_when_its_parameters_go() -> None:
    params = params_of(*SHAPES)
    earlier = tidegate.AdamW(params, offload=MIXED)
    tidegate.attach(earlier, run="again")
    with tidegate.AdamW(params, offload=MIXED) as optimizer, tidegate.attach(optimizer, run="again"):
        assert earlier.attachment is None
        steps_are_exact(optimizer, params)


def test_in_a_fork_the_parents_parameters_are_refused() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as earlier:
        run_steps(earlier, params, 0, 1)
        child = os.fork()
        if child == 0:
            try:
                tidegate.AdamW(params, offload=MIXED)
            except ParameterError as error:
                os._exit(7 if "was forked from" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        run_steps(earlier, params, 1, 1)
