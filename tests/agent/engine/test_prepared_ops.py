"""Ops that lanes run without the interpreter: which ones they are, and what happens when their tasks fail."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.agent.tiers.faults import flip_bit, state_file, store_of, train, training
from tests.services import until
from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.op_runner import MemoryRunner
from tidegate.agent.engine.plan_execution import IssuedOp, PreparedOp
from tidegate.agent.engine.prepared_ops import OpPreparer
from tidegate.agent.tiers.file_moves import MAX_PREPARED
from tidegate.agent.tiers.file_path import PathSettings, StoragePath
from tidegate.errors import BlockDamaged, StateLost
from tidegate.kernels import aligned_buffer
from tidegate.kernels.dispatch import TransferTask, copy_task
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.plan import Plan

INFINITY = float("inf")


@contextmanager
def ran_in_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OpKind]]:
    """The kinds of the ops that the op runner runs. The gradient norm waits until all ops of the step are prepared."""
    run, norm, in_step = MemoryRunner.run, MemoryRunner._norm, OpPreparer.in_step
    kinds: list[OpKind] = []
    prepared = threading.Event()

    def noted(runner: MemoryRunner, op: Op, begun: Callable[[], None]) -> IssuedOp:
        kinds.append(op.kind)
        return run(runner, op, begun)

    def late(runner: MemoryRunner) -> IssuedOp:
        assert prepared.wait(30)
        prepared.clear()
        return norm(runner)

    def known(preparer: OpPreparer, plan: Plan) -> Iterator[dict[int, PreparedOp]]:
        yield from in_step(preparer, plan)
        prepared.set()  # the executor has taken the last ones

    with monkeypatch.context() as patch:
        patch.setattr(MemoryRunner, "run", noted)
        patch.setattr(MemoryRunner, "_norm", late)
        patch.setattr(OpPreparer, "in_step", known)
        yield kinds


@pytest.mark.parametrize("lock_slots", [0, 1])
def test_from_the_norm_to_the_last_flush_no_op_needs_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock_slots: int
) -> None:
    paths = {"one": PathSettings(directory=tmp_path, lock_slots=lock_slots)}
    with training(paths, stride="off") as pair:
        train(pair, 0, 2)
        with ran_in_python(monkeypatch) as kinds:
            train(pair, 2, 2)
        assert set(kinds) == {OpKind.GRAD_D2H, OpKind.NORM}
        pair.assert_same_state()


def test_updates_make_the_checksums_of_the_flushes_that_follow_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush_after = OpPreparer._flush_after
    flushes: dict[int, TransferTask | None] = {}

    def noted(preparer: OpPreparer, update: Op) -> TransferTask | None:
        flushes[update.subgroup] = found = flush_after(preparer, update)
        return found

    monkeypatch.setattr(OpPreparer, "_flush_after", noted)
    with training({"one": tmp_path}, stride="off") as pair:
        train(pair, 0, 3)
        path = store_of(pair.optimizer).paths["one"]
        assert isinstance(path, StoragePath)
        stored = {number for number, lives in enumerate(pair.optimizer.engine.memory.residence) if lives == "one"}
        assert {number for number, flush in flushes.items() if flush is not None} >= stored
        for number in stored:
            assert flushes[number] in [task for key, task in tasks_of(path).items() if key[:2] == (number, "write")]
        pair.assert_same_state()


def test_a_factor_for_all_gradients_reaches_updates_that_were_prepared_before_it_was_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, with `maximize`, in an interleaved plan; held against torch."""
    generator = torch.Generator().manual_seed(3)
    mine = [torch.nn.Parameter(torch.randn(600, generator=generator)) for _ in range(4)]
    other = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    reference = torch.optim.AdamW(other, lr=0.01, maximize=True, foreach=False)
    offload = tidegate.Offload(stride=3.0, subgroup_numel=500)
    groups = [{"params": mine, "maximize": True}]
    with (
        tidegate.AdamW(groups, lr=0.01, max_grad_norm=0.5, offload=offload) as optimizer,
        ran_in_python(monkeypatch) as kinds,
    ):
        for _ in range(3):
            for a, b in zip(mine, other, strict=True):
                a.grad = torch.randn(600, generator=generator)
                b.grad = a.grad.clone()
            optimizer.step()
            torch.nn.utils.clip_grad_norm_(other, 0.5)
            reference.step()
        optimizer.wait()
    assert OpKind.CPU_UPDATE not in kinds
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def tasks_of(path: StoragePath) -> dict[tuple[int, str, int], TransferTask]:
    """The tasks that a path keeps, by subgroup, operation and address."""
    return {(number, *key): move.task for number, file in path.states.items() for key, move in file.prepared.items()}


def test_a_move_of_an_earlier_plan_is_not_counted_when_a_later_plan_runs_its_task(tmp_path: Path) -> None:
    """As where a thread that counts has seen the moves of a plan that was dropped."""
    with training({"one": tmp_path}, stride="off") as pair:
        train(pair, 0, 2)
        path = store_of(pair.optimizer).paths["one"]
        assert isinstance(path, StoragePath)
        mover, file = path._mover, path.states[0]
        address = next(address for operation, address in file.prepared if operation == "read")
        dropped = mover.prepare("read", file, address)
        path.counters.prepared.clear()
        before = path.counters.bytes["read"]
        train(pair, 2, 2)
        assert dropped is not None
        mover.count(dropped)
        stored = sum(file.data_bytes for file in path.states.values())
        assert path.counters.bytes["read"] == before + 2 * stored


def test_transfers_of_later_steps_run_the_tasks_of_earlier_ones_again_and_each_run_is_counted(tmp_path: Path) -> None:
    with training({"one": tmp_path}, stride="off") as pair:
        train(pair, 0, 4)
        path = store_of(pair.optimizer).paths["one"]
        tasks = tasks_of(path)
        before, moves = dict(path.counters.bytes), len(path.counters.moves)
        train(pair, 4, 2)
        assert tasks_of(path) == tasks
        stored = sum(file.data_bytes for file in path.states.values())
        assert path.counters.bytes == {operation: nbytes + 2 * stored for operation, nbytes in before.items()}
        assert len(path.counters.moves) == moves + 4 * len(path.states)
        task = next(task for task in tasks.values() if task.succeeded)
        task.reset()
        assert (task.succeeded, task.ticket, task.entered) == (False, None, None)
        pair.assert_same_state()


def test_a_file_keeps_few_tasks(tmp_path: Path) -> None:
    with training({"one": tmp_path}) as pair:
        train(pair, 0, 2)
        path = store_of(pair.optimizer).paths["one"]
        mover, file = path._mover, path.states[0]
        memory = aligned_buffer(100 * file.data_bytes)
        for place in range(100):
            assert mover.prepare("read", file, memory.ctypes.data + place * file.data_bytes) is not None
            assert len(file.prepared) <= MAX_PREPARED
        path.counters.prepared.clear()
        train(pair, 2, 2)
        pair.assert_same_state()


def test_a_transfer_that_fails_goes_on_in_python_as_its_second_attempt(tmp_path: Path) -> None:
    with training({"one": tmp_path}, stride="off") as pair:
        train(pair, 0, 2)
        counters, file = store_of(pair.optimizer).paths["one"].counters, state_file(pair, "one")
        flip_bit(file)
        with pytest.raises(StateLost) as caught:
            train(pair, 2)
        assert isinstance(caught.value.__cause__, BlockDamaged)
        assert counters.retries["read"] == 1
        assert counters.errors["read"] == 2


class Runner:
    """Runs nothing; its memory is what a task writes to."""

    def __init__(self) -> None:
        self.memory = np.zeros(1000, np.uint8)

    def wait(self, lane: str, event: Event) -> None: ...

    def run(self, op: Op, begun: Callable[[], None]) -> IssuedOp:
        return IssuedOp(DoneEvent(0.0, 0.0), 0, 0)

    def prepared(self, seconds: float) -> PreparedOp:
        address = self.memory.ctypes.data
        return PreparedOp(copy_task([(address + 500, address, 500)], 500 / seconds if seconds else INFINITY))


def one_op() -> Plan:
    return Plan("interleaved", (), (), 2, (Op(0, OpKind.CPU_UPDATE, 0, 0, 0),))


def test_memory_lives_until_the_task_that_uses_it_has_ended() -> None:
    runner: Any = Runner()
    gone, memory = weakref.ref(runner), weakref.ref(runner.memory)
    executor: Any = Executor(runner)
    began = time.monotonic()
    executor.start(one_op(), {0: runner.prepared(0.3)})
    executor.step()
    until(lambda lanes=executor._lanes: lanes.oldest() is not None, "the task")
    del runner, executor
    gc.collect()
    assert time.monotonic() - began > 0.29
    until(lambda: gone() is None and memory() is None, "the memory freed")


def test_an_op_that_has_begun_is_not_prepared_any_more() -> None:
    runner = Runner()
    executor = Executor(runner)
    executor.start(one_op())
    executor.step()
    executor.wait_until_issued([0])
    completed: list[int] = []
    late = runner.prepared(0.0)
    executor.prepare({0: PreparedOp(late.task, completed=lambda: completed.append(1))})
    spans, _ = executor.finish()
    assert [span.op for span in spans] == [0]
    assert not completed
    executor.close()


def test_what_a_task_did_is_recorded_once_also_when_the_plan_is_cancelled() -> None:
    runner = Runner()
    executor = Executor(runner)
    completed: list[int] = []
    for end in (executor.finish, executor.cancel):
        prepared = runner.prepared(0.0)
        ops = {0: PreparedOp(prepared.task, 7, 3, completed=lambda: completed.append(1))}
        executor.start(one_op(), ops)
        executor.step()
        executor.wait_until_issued([0])
        end()
    assert completed == [1, 1]
    executor.close()
