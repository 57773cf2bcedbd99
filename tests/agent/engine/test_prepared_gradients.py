"""Ops that read gradients and run without the interpreter: which ones they are, and when gradients are released."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.test_optimizer import params_of
from tests.agent.tiers.faults import train, training
from tests.services import until
from tidegate.agent.devices.base import GradRef
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.engine.gradient_routing import GradientRouting
from tidegate.agent.engine.op_runner import MemoryRunner
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.agent.engine.prepared_gradients import GradientOpPreparer
from tidegate.agent.gradients.gradients import Gradients
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.kernels import GradDtype, ThreadPool, sum_of_squares
from tidegate.kernels.dispatch import Lanes, Program, TaskList, squares_task
from tidegate.plan.ops import D2H, DEVICE, Op, OpKind

READS_GRADIENT = {OpKind.GRAD_D2H, OpKind.GRAD_NORM}


def note_runs(monkeypatch: pytest.MonkeyPatch) -> Counter[OpKind]:
    """The kinds of the ops that the op runner runs from now on."""
    run, kinds = MemoryRunner.run, Counter[OpKind]()

    def noted(runner: MemoryRunner, op: Op, begun: Callable[[], None]) -> IssuedOp:
        kinds[op.kind] += 1
        return run(runner, op, begun)

    monkeypatch.setattr(MemoryRunner, "run", noted)
    return kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_released_gradient_is_read_without_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    with training({"one": PathSettings(directory=tmp_path)}, dtype, stride="off", gradients="release") as pair:
        kinds = note_runs(monkeypatch)
        train(pair, 0, 4)
        assert kinds[OpKind.NORM] == 4
        assert not READS_GRADIENT & set(kinds)
        pair.assert_same_state()


def test_copies_that_have_not_begun_are_prepared_in_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, prepare, prepared = MemoryRunner._grad_d2h, GradientRouting.prepare_copies, threading.Event()

    def late(runner: MemoryRunner, op: Op, layout: Layout) -> IssuedOp:
        assert prepared.wait(30)
        return copy(runner, op, layout)

    def noted(routing: GradientRouting) -> None:
        prepare(routing)
        prepared.set()

    with training({"one": PathSettings(directory=tmp_path)}, stride="off") as pair:
        train(pair, 0)
        monkeypatch.setattr(MemoryRunner, "_grad_d2h", late)
        monkeypatch.setattr(GradientRouting, "prepare_copies", noted)
        kinds = note_runs(monkeypatch)
        train(pair, 1)
        assert kinds[OpKind.GRAD_D2H] <= 1, "at most the one that the lane had begun"
        pair.assert_same_state()


def test_a_gradient_stays_in_memory_until_its_tasks_have_read_it() -> None:
    """Also when the engine has forgotten the gradient meanwhile, as after an error."""
    params = params_of((5000,))
    offload = tidegate.Offload(stride="off", subgroup_numel=5000, emulated=FAST, gradients="release")
    with tidegate.AdamW(params, offload=offload) as optimizer:
        engine = optimizer.engine
        before = optimizer.device.in_use_bytes
        backward(params, random_grads(params, 0, some=False))
        engine.gradients.forget()
        assert optimizer.device.in_use_bytes == before + 4 * 5000
        engine._executor.wait_until_ready_ops_issued((D2H, DEVICE))
        engine.drop_plan(dropping=True)
        assert optimizer.device.in_use_bytes == before


@pytest.mark.parametrize("where", ["prepared", "recorded"])
def test_training_goes_on_after_ctrl_c_in_the_hook_of_a_gradient(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = (GradientOpPreparer, "_copy") if where == "prepared" else (Gradients, "was_read")
    work, once = getattr(owner, name), [signal.SIGINT]

    def interrupted(*given: Any) -> Any:
        if once:
            signal.raise_signal(once.pop())
        return work(*given)

    params = params_of((5000,), (5000,), (5000,))
    offload = tidegate.Offload(stride="off", subgroup_numel=1000, emulated=FAST, gradients="release")
    with tidegate.AdamW(params, offload=offload) as optimizer:
        before = optimizer.device.in_use_bytes
        monkeypatch.setattr(owner, name, interrupted)

        def arrive() -> None:
            backward(params, random_grads(params, 0, some=False))
            optimizer.engine._executor.wait_until_ready_ops_issued((D2H, DEVICE))
            optimizer.engine.routing.release_read()

        with pytest.raises(KeyboardInterrupt):
            arrive()
        optimizer.zero_grad()
        assert optimizer.device.in_use_bytes == before
        for step in range(3):
            backward(params, random_grads(params, step, some=False))
            optimizer.step()
            optimizer.zero_grad()
        weights = [param.detach().clone() for param in params]
    plain = params_of((5000,), (5000,), (5000,))
    with tidegate.AdamW(plain, offload=offload) as optimizer:
        for step in range(3):
            backward(plain, random_grads(plain, step, some=False))
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(weights, plain, strict=True))


def test_a_gradient_that_is_not_on_the_device_gets_no_task() -> None:
    elsewhere = np.ones(64, np.float32)
    device = EmulatedDevice(1 << 20)
    assert device.norms_task(lambda: [GradRef(elsewhere.ctypes.data, 64, GradDtype.F32)]) is None
    device.close()


def run_task(task: Any) -> None:
    lanes = Lanes([False])
    lanes.start(Program([(0, 0, -1, False, False, [])]), TaskList([(0, task)]))
    thread = threading.Thread(target=lanes.take, args=(0,))
    thread.start()
    until(lambda: lanes.is_done, "the task")
    lanes.close()
    thread.join()


@pytest.mark.parametrize("numel", [0, 1, 65536, 65537, 200_000])
def test_a_task_sums_the_squares_of_several_gradients(numel: int) -> None:
    generator = np.random.default_rng(numel)
    fp32 = generator.normal(size=numel).astype(np.float32)
    fp32[:1] = np.inf
    bf16 = (generator.normal(size=numel).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with ThreadPool(2) as pool:
        refs = [(fp32.ctypes.data, numel, GradDtype.F32), (bf16.ctypes.data, numel, GradDtype.BF16)]
        task = squares_task(pool, refs)
        assert task.sums == []
        run_task(task)
        assert task.sums == [sum_of_squares(pool, *ref) for ref in refs]
        assert task.sums[0][1] == min(numel, 1)


def test_a_task_refuses_addresses_and_dtypes_that_cannot_be() -> None:
    with ThreadPool(1) as pool:
        for wrong, what in (((0, 4, GradDtype.F32), "address"), ((6, 4, GradDtype.F32), "multiple of 4")):
            with pytest.raises(ValueError, match=what):
                squares_task(pool, [wrong])
        unknown: Any = 9
        with pytest.raises(ValueError, match="dtype is 9"):
            squares_task(pool, [(64, 4, unknown)])
