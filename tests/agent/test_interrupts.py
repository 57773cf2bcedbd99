"""Ctrl-C: the first comes when the engine is at rest, the second at once, and nothing is lost by either."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import tidegate
from tests.agent.test_awkward import plain_of
from tests.agent.test_exactness import backward, random_grads
from tests.agent.test_optimizer import MIXED, params_of
from tests.agent.test_overlap import overlapped, tokens
from tidegate.agent.engine.executor import Issued
from tidegate.agent.engine.interrupts import DelayInterrupt
from tidegate.plan import Plan
from tidegate.plan.ops import Op, OpKind


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Also where whoever started the tests in the background had SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_middle_of_an_update_comes_after_it() -> None:
    params = params_of((400,), (300,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            grads = random_grads(params, step, some=False)
            backward(params, grads)
            interrupt_at(optimizer, OpKind.DEVICE_UPDATE)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            plain.step(grads)
            assert plain.same_weights(params)
        assert optimizer.state_dict()["state"][0]["step"] == 4


@pytest.mark.parametrize("when", ["backward", "backward, begun anew", "step"])
def test_ctrl_c_while_a_plan_starts_leaves_a_usable_optimizer(when: str) -> None:
    params = params_of((300,))
    with tidegate.AdamW(params, lr=0.1, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        start = optimizer.engine._executor.start

        def interrupted(plan: Plan) -> None:
            optimizer.engine._executor.start = start  # type: ignore[method-assign]
            start(plan)
            os.kill(os.getpid(), signal.SIGINT)

        grads = random_grads(params, 0, some=False)
        if when == "step":
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        optimizer.engine._executor.start = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            optimizer.step() if when == "step" else backward(params, grads)
        if when == "backward, begun anew":
            optimizer.zero_grad()
            backward(params, grads)
        if when != "step":
            optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def test_ctrl_c_in_wait_loses_no_result() -> None:
    model, optimizer = overlapped(emulated=tidegate.EmulatedRates(h2d_bytes_per_second=6e4, d2h_bytes_per_second=6e4))
    with optimizer, tidegate.overlap_forward(optimizer, model):
        seen: list[bool] = []
        optimizer.observers.append(lambda result, _: seen.append(result.skipped))
        model(tokens(0)).square().mean().backward()
        optimizer.step()
        assert optimizer.engine.running
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            tidegate.wait(optimizer)
        assert not optimizer.engine.running
        tidegate.wait(optimizer)
        assert seen == [False]


def test_the_second_ctrl_c_is_let_through_however_deep() -> None:
    reached: list[int] = []

    def interrupted_twice() -> None:
        with DelayInterrupt(), DelayInterrupt(), DelayInterrupt():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_first_ctrl_c_comes_at_the_end_of_the_outermost_block() -> None:
    reached: list[int] = []

    def interrupted_once() -> None:
        with DelayInterrupt():
            with DelayInterrupt():
                signal.raise_signal(signal.SIGINT)
                reached.append(1)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        interrupted_once()
    assert reached == [1, 2]


def interrupt_at(optimizer: tidegate.AdamW, kind: OpKind) -> None:
    """The next op of this kind is met by a SIGINT to this process."""
    runner = optimizer.engine._runner
    run = type(runner).run
    once = threading.Event()

    def interrupting(op: Op, begun: Callable[[], None]) -> Issued:
        if op.kind is kind and not once.is_set():
            once.set()
            os.kill(os.getpid(), signal.SIGINT)
        return run(runner, op, begun)

    runner.run = interrupting  # type: ignore[method-assign]
