"""The native dispatcher against a slow reference, under random interleavings; recorded executions; many threads."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.kernels.dispatch.exploring import MUTATIONS, UNCHANGED, Mutation, Reference, explore
from tests.services import ROOT
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.plan_execution import program_of
from tidegate.kernels.dispatch import Dispatcher, Gate, Lanes, Outcome, Program, Until
from tidegate.plan import Plan

SEEDS, CAMPAIGN = 3000, 100_000
SOURCES = ROOT / "kernels" / "src"


def explore_all(seeds: Iterable[int], mutation: Mutation = UNCHANGED) -> list[Reference]:
    return [explore(seed, mutation) for seed in seeds]


def test_every_decision_is_one_that_the_rules_allow() -> None:
    found = explore_all(range(SEEDS))
    assert sum(bool(reference.repeated) for reference in found) > SEEDS / 20
    assert sum(reference.skipped for reference in found) > SEEDS / 200
    assert sum(reference.failed is not None for reference in found) > SEEDS / 200


@pytest.mark.torture
@pytest.mark.parametrize("part", range(10))
def test_every_decision_of_a_long_exploration(part: int) -> None:
    each = CAMPAIGN // 10
    explore_all(range(SEEDS + part * each, SEEDS + (part + 1) * each))


@pytest.mark.parametrize("fault", MUTATIONS)
def test_the_exploration_finds(fault: str) -> None:
    with pytest.raises(AssertionError):
        explore_all(range(SEEDS), MUTATIONS[fault])


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ((2, 0, 0, False, False, []), "lane is 2"),
        ((0, 0, 0, False, False, [1]), "dependency is 1"),
        ((0, 0, 0, False, False, [-1]), "dependency is -1"),
        ((0, 3, 0, False, False, []), "gate is 3"),
        ((0, Gate.GRADIENT, -1, False, False, []), "subgroup is -1"),
    ],
)
def test_a_program_that_cannot_be_run_is_refused(op: tuple[int, int, int, bool, bool, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dispatcher(Program([(0, 0, 0, False, False, []), op]), [False, False])


def test_a_real_step_that_was_recorded_replays_to_the_same_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    logs: list[list[tuple[str, int, float, list[int], int]]] = []
    ahead: list[list[bool]] = []
    start, finish = Executor.start, Executor.finish

    def recording(executor: Executor, plan: Plan, *prepared: Any) -> None:
        executor._lanes.record(True)
        plans.append(plan)
        ahead.append([name in executor._ahead for name in executor._names])
        start(executor, plan, *prepared)

    def noted(executor: Executor) -> object:
        executor._wait(Until.DONE)
        logs.append(executor._lanes.recorded())
        return finish(executor)

    monkeypatch.setattr(Executor, "start", recording)
    monkeypatch.setattr(Executor, "finish", noted)
    params = [torch.nn.Parameter(torch.randn(400)) for _ in range(6)]
    with tidegate.AdamW(params, offload=tidegate.Offload(subgroup_numel=300, stride=2.0, num_slots=2)) as optimizer:
        for _ in range(3):
            sum((p**2).sum() for p in params).backward()
            params[2].grad *= 0.5  # its copy is repeated
            optimizer.step()
            optimizer.zero_grad()
        names = optimizer.engine._executor._names
    assert len(logs) == 3
    for plan, log, runs_ahead in zip(plans[-3:], logs, ahead[-3:], strict=True):
        begun = [answer for what, *_, answer in log if what == "begin"]
        dispatcher = Dispatcher(program_of(plan, names), runs_ahead, min(begun))
        assert len(begun) >= len(plan.ops)
        for what, number, now, ops, answer in log:
            if what == "begin":
                decided = dispatcher.begin(number, now)
                assert decided is not None
                assert decided[:2] == (ops[0], answer)
            elif what == "ended":
                dispatcher.ended(number, answer, now)
            elif what == "queued":
                dispatcher.queued(number)
            elif what == "drop":
                dispatcher.drop()
            else:
                getattr(dispatcher, what)(ops)
        assert dispatcher.is_done


def test_lanes_without_an_execution_wait_for_nothing() -> None:
    lanes = Lanes([False])
    assert lanes.wait(Until.DONE, [], 0.0)
    assert lanes.is_done
    lanes.open_gradients([0])
    lanes.ended(7, Outcome.ISSUED)
    assert lanes.issued_from() == []
    lanes.start(Program([(0, Gate.STEP, 0, False, False, [])]))
    assert not lanes.wait(Until.DONE, [], 0.01)
    lanes.close()
    assert lanes.take(0) is None


@pytest.mark.torture
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_many_threads_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """A driver in C++ runs thousands of programs with a thread for each lane, and two for those that run ahead."""
    program = tmp_path / "driver"
    sources = [
        Path(__file__).with_name("lanes_driver.cpp"),
        *(SOURCES / f"{name}.cpp" for name in ("computing_cores", "dispatcher", "lanes")),
    ]
    command = ["c++", "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run([*command, f"-I{SOURCES}", *map(str, sources), "-pthread", "-o", str(program)], check=True)
    done = subprocess.run([str(program), "3000"], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["programs", "3000"]
