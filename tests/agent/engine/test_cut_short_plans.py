"""A second Ctrl-C cuts the start or the drop of a plan short: the next step still updates everything, exactly."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import backward, random_grads
from tests.agent.engine.test_interrupts import RaisesAtCall, trained
from tests.agent.optimizer.test_awkward_moments import plain_of
from tests.agent.optimizer.test_optimizer import MIXED, params_of
from tidegate.errors import EngineError, LaneStuckError

Grads = list[torch.Tensor | None]


class Training(NamedTuple):
    """A model with Tidegate's optimizer, and the plain AdamW that it must equal."""

    params: list[torch.nn.Parameter]
    optimizer: tidegate.AdamW
    plain: Any

    def backward(self, seed: int = 1) -> Grads:
        grads = random_grads(self.params, seed, some=False)
        backward(self.params, grads)
        return grads

    def step_equals(self, grads: Grads) -> bool:
        self.optimizer.step()
        self.plain.step(grads)
        return bool(self.plain.same_weights(self.params))

    def goes_on(self) -> bool:
        """Whether two more steps are exact, and two steps were counted before them."""
        return self.optimizer.steps == (2, 2) and trained(self.params, self.optimizer, self.plain, range(2, 4))

    def forget_grads(self) -> None:
        for param in self.params:
            param.grad = None


@contextlib.contextmanager
def training(offload: tidegate.Offload = MIXED) -> Iterator[Training]:
    """One step is done, and gradients are zero."""
    params = params_of((400,), (300,))
    with tidegate.AdamW(params, offload=offload) as optimizer:
        plain = plain_of(optimizer)
        assert trained(params, optimizer, plain, range(1))
        optimizer.zero_grad()
        yield Training(params, optimizer, plain)


@contextlib.contextmanager
def waits_are_cut_short(optimizer: tidegate.AdamW) -> Iterator[None]:
    """In the block, every wait of the executor raises KeyboardInterrupt, which must come out of it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer.engine._executor, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("storage", [False, True], ids=["host", "path"])
@pytest.mark.parametrize("then", ["step", "backward anew"])
def test_a_step_after_a_drop_that_was_cut_short_updates_all(storage: bool, then: str, tmp_path: Path) -> None:
    with training(dataclasses.replace(MIXED, paths={"one": tmp_path}, host_cache=0) if storage else MIXED) as t:
        grads = t.backward()
        with waits_are_cut_short(t.optimizer):
            t.optimizer.state_dict()
        t.optimizer.engine.stage()  # as the next forward does: not while ops still use the memory
        if then == "backward anew":
            t.forget_grads()
            t.backward()
        assert t.step_equals(grads)
        assert t.goes_on()


def test_released_gradients_are_gone_after_a_drop_that_was_cut_short() -> None:
    with training(dataclasses.replace(MIXED, gradients="release")) as t:
        t.backward()
        with waits_are_cut_short(t.optimizer):
            t.optimizer.zero_grad()
        assert all(param.grad is None for param in t.params)
        t.optimizer.step()
        assert t.optimizer.steps == (1, 1), "there was nothing to update"
        assert t.step_equals(t.backward())
        t.optimizer.zero_grad()
        assert t.goes_on()


def test_a_plan_whose_start_was_cut_short_is_dropped_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes run the plan already, and the engine does not know of it yet."""
    with training() as t:
        executor = t.optimizer.engine._executor
        start: Callable[..., None] = executor.start

        def starting(*given: Any) -> None:
            start(*given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(executor, "start", starting)
            with pytest.raises(KeyboardInterrupt):
                t.backward()
        t.forget_grads()
        assert t.step_equals(t.backward())
        assert t.goes_on()


def test_a_lane_that_is_stuck_while_a_plan_is_dropped_makes_the_optimizer_unusable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with training() as t:
        t.backward()
        executor = t.optimizer.engine._executor

        def find_stuck(*_: object) -> None:
            executor.stuck = True
            raise LaneStuckError("Lane h2d is stuck")

        with monkeypatch.context() as patched:
            patched.setattr(executor, "stuck", False)  # as it is again after this block
            patched.setattr(executor, "_wait", find_stuck)
            with pytest.raises(LaneStuckError):
                t.optimizer.zero_grad()
        with pytest.raises(EngineError, match="not usable: LaneStuckError: Lane h2d is stuck"):
            t.optimizer.step()


def drop(t: Training) -> None:
    t.optimizer.engine.drop_plan(dropping=True)


def start(t: Training) -> None:
    t.optimizer.engine.start()


def run_backward(t: Training) -> None:
    t.backward()


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["keep", "release"])
@pytest.mark.parametrize("work", [drop, start, run_backward])
def test_wherever_a_handler_raises_before_a_step_the_next_step_is_whole(
    work: Callable[[Training], None], gradients: Literal["keep", "release"]
) -> None:
    """Released gradients are dropped then; others stay in `.grad`, and another backward adds to them, as in torch."""
    offload = dataclasses.replace(MIXED, gradients=gradients)

    def raised_at(place: int, t: Training) -> int:
        if work is drop:
            t.backward()
        with contextlib.suppress(SystemExit), RaisesAtCall(place) as counting:
            work(t)
        return counting.places

    with training(offload) as t:
        places = raised_at(-1, t)
    assert places > 20
    for at in range(1, places + 1, 1 if work is drop else 5):
        with training(offload) as t:
            raised_at(at, t)
            assert t.optimizer.engine.usable, at
            if gradients == "release":
                t.optimizer.zero_grad()
            keeps_all = work is drop and gradients == "keep"
            grads: Grads = [] if keeps_all else t.backward()
            if gradients == "keep":
                grads = [param.grad.clone() for param in t.params if param.grad is not None]
            assert t.step_equals(grads), at
            assert t.goes_on(), at
