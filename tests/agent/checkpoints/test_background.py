"""Checkpoints that are drained while training goes on: as it was when they began, complete or not at all."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.checkpoints.saving import WAYS, Run, both, files_of, links, names_in, other_ways, state_files
from tests.agent.optimizer.background import update_in_background
from tidegate.agent.checkpoints import background as draining
from tidegate.agent.checkpoints import writer
from tidegate.agent.checkpoints.background import PendingCheckpoint
from tidegate.agent.checkpoints.discovery import find_checkpoints
from tidegate.agent.tiers.state_reads import HeldFile
from tidegate.errors import BlockDamaged, CheckpointFailed, ConfigError, EngineError, WeightsMismatch


class Valve:
    """Holds drains back, file by file, until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.write = draining.write_state
        self.files: list[str] = []

    def __call__(self, pool: Any, state: Any, target: Path, *more: Any) -> None:
        assert self.open.wait(60)
        self.files.append(target.name)
        self.write(pool, state, target, *more)


@pytest.fixture
def valve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Valve]:
    made = Valve()
    monkeypatch.setattr(draining, "write_state", made)
    yield made
    made.open.set()


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    def refused(*_: Any) -> None:
        raise error or OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(draining, "write_state", refused)


def ended(pending: PendingCheckpoint) -> PendingCheckpoint:
    """Without being told how."""
    assert pending._ended.wait(60)
    return pending


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize("saved", ["the same", "no paths"])
def test_holds_the_state_as_it_was_when_it_began(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve, dtype: torch.dtype, saved: str
) -> None:
    """Three updates write over everything before the first byte is copied."""
    ways = other_ways(disk, memory)
    with Run(dtype, **ways[saved]) as run:
        run.steps(0, 4)
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved")
        middle = [param.detach().clone() for param in run.params], deepcopy(run.plain)
        run.steps(4, 7)
        assert not pending.done()
        assert find_checkpoints(tmp_path / "saved") == []
        valve.open.set()
        made = pending.result()
        assert (made.step, pending.copied_bytes) == (4, pending.total_bytes)
        assert find_checkpoints(tmp_path / "saved") == [made]
        run.steps(7, 8)
    for way in WAYS:
        with Run(dtype, **ways[way]) as other:
            for param, weight in zip(other.params, middle[0], strict=True):
                param.data.copy_(weight)
            other.plain = deepcopy(middle[1])
            assert other.optimizer.load_checkpoint(tmp_path / "saved").step == 4
            other.steps(4, 8)
            assert all(map(torch.equal, run.params, other.params)), way


def test_what_is_linked_held_and_copied(tmp_path: Path, disk: Path, memory: Path, valve: Valve) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        lives = list(run.optimizer.engine.memory.residence)
        assert {"disk", "memory", "host", "device"} == set(lives)
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved", memory_bytes=8192)
        (folder,) = (tmp_path / "saved").glob("step-2/rank0-*")
        there = {path.name for path in folder.glob("*.tide")}
        valve.open.set()
        made = pending.result()
        late = {path.name for path in files_of(made)} - there
        assert sorted(late) == valve.files
        assert late >= {f"{i:06d}.tide" for i, place in enumerate(lives) if place == "memory"}
        assert len(late) == lives.count("memory") + 1, "memory for the copy of one subgroup, of 600 parameters"
        assert links(made) == [2 if place == "disk" else 1 for place in lives]
        before = state_files(made)
        run.steps(2, 4)
        assert state_files(made) == before
        run.optimizer.begin_checkpoint(tmp_path / "saved", keep=2).result()
        assert state_files(made) == before
        run.optimizer.save_checkpoint(tmp_path / "saved", keep=2)
        run.optimizer.begin_checkpoint(tmp_path / "saved", keep=2).result()
        assert [found.directory.name for found in find_checkpoints(tmp_path / "saved")] == ["step-4.4", "step-4.3"]


def test_nothing_to_drain_is_complete_at_once(tmp_path: Path, disk: Path) -> None:
    with Run(paths={"disk": disk}, host_cache=0, static_ratio=0.0) as run:
        run.steps(0, 2)
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved")
        assert pending.done()
        assert find_checkpoints(tmp_path / "saved") == [pending.result()]
    with Run() as run:
        run.steps(0, 1)
        assert run.optimizer.begin_checkpoint(tmp_path / "now", memory_bytes=0).done()
        with pytest.raises(ConfigError, match="memory_bytes=-1"):
            run.optimizer.begin_checkpoint(tmp_path / "now", memory_bytes=-1)


def test_older_ones_go_and_the_last_good_one_is_named_only_when_it_is_complete(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve
) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 1)
        first = run.optimizer.save_checkpoint(tmp_path / "saved")
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved")
        store = run.optimizer.engine.store
        assert store is not None
        assert store.last_checkpoint == str(first.directory)
        assert find_checkpoints(tmp_path / "saved") == [first]
        lives = run.optimizer.engine.memory.residence
        assert all(store.paths[where].has_spare(s) for s, where in enumerate(lives) if where in store.paths)
        run.steps(1, 3)
        valve.open.set()
        made = pending.result()
        assert store.last_checkpoint == str(made.directory)
        assert names_in(tmp_path / "saved") == [made.directory.name]


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("way", ["save_checkpoint", "begin_checkpoint"])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_keeps_older_ones_from_being_removed_is_said_and_the_new_one_is_there(
    tmp_path: Path, disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    way: str, error: Exception,
) -> None:  # fmt: skip
    def refused(_: object) -> None:
        raise error

    with Run(**both(disk, memory)) as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        run.steps(1, 2)
        with monkeypatch.context() as patched:
            patched.setattr(writer, "unpublish", refused)
            made = getattr(run.optimizer, way)(tmp_path / "saved")
            made = made.result() if way == "begin_checkpoint" else made
            run.optimizer.wait()
        assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [2, 1]
        assert f"older ones cannot be removed: {str(error) or 'MemoryError'}" in caplog.text
        run.steps(2, 3)
        getattr(run.optimizer, way)(tmp_path / "saved")
    assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [3]


def test_a_spare_that_has_no_room_makes_training_wait_instead(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {"disk": disk, "memory": tidegate.PathSettings(directory=memory, capacity_bytes=72_000)}
    with Run(**both(disk, memory, paths=paths, stride="off")) as run:
        run.steps(0, 2)
        lives = list(run.optimizer.engine.memory.residence)
        assert 12_288 * lives.count("memory") < 72_000 < 2 * 12_288 * lives.count("memory")
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved", memory_bytes=0)
        assert "are copied while training waits" in caplog.text
        waiting = pending.total_bytes // 8192
        assert 0 < waiting < lives.count("memory")
        run.steps(2, 4)
        valve.open.set()
        pending.result()
        run.steps(4, 6)


@pytest.mark.parametrize("second", ["begin_checkpoint", "save_checkpoint"])
def test_one_after_the_other(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve, monkeypatch: pytest.MonkeyPatch, second: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    settle = PendingCheckpoint.wait_and_agree

    def opened(self: PendingCheckpoint) -> None:
        assert not self.done()
        valve.open.set()
        settle(self)

    with Run(**both(disk, memory)) as run:
        run.steps(0, 1)
        first = run.optimizer.begin_checkpoint(tmp_path / "saved", keep=2)
        run.steps(1, 2)
        monkeypatch.setattr(PendingCheckpoint, "wait_and_agree", opened)
        getattr(run.optimizer, second)(tmp_path / "saved", keep=2)
        assert first.done()
    assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [2, 1]
    assert caplog.text == ""


def test_a_load_waits_for_it(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = PendingCheckpoint.wait_and_agree
    monkeypatch.setattr(PendingCheckpoint, "wait_and_agree", lambda self: (valve.open.set(), settle(self)))
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        run.optimizer.begin_checkpoint(tmp_path / "saved")
        assert run.optimizer.load_checkpoint(tmp_path / "saved").step == 2
        run.steps(2, 4)


# ---- it yields to updates


def test_no_chunk_is_begun_while_an_update_runs(
    tmp_path: Path, disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "POLL_SECONDS", 0.0)
    answers = [True, True, False, True, False, False, False]
    asked: list[tuple[bool, int]] = []
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        begun: list[PendingCheckpoint] = []

        def updating(self: PendingCheckpoint) -> bool:
            answer = answers.pop(0) if answers else False
            asked.append((answer, self.copied_bytes))
            return answer

        init = PendingCheckpoint.__init__

        def watched(self: PendingCheckpoint, *args: Any) -> None:
            init(self, *args)
            self._updating = lambda: updating(self)
            begun.append(self)

        monkeypatch.setattr(PendingCheckpoint, "__init__", watched)
        run.optimizer.begin_checkpoint(tmp_path / "saved").result()
    assert [copied for _, copied in asked[:5]] == [0, 0, 0, 8192, 8192]
    assert asked[-1][1] + 8192 >= begun[0].total_bytes


def test_the_engines_updates_are_what_it_yields_to(tmp_path: Path, disk: Path, memory: Path, valve: Valve) -> None:
    """The update's flushes are held until the question was asked: an update of this size may end before it."""
    with Run(**both(disk, memory)) as run, pytest.MonkeyPatch.context() as patched:
        run.steps(0, 1)
        engine = run.optimizer.engine
        assert engine.store is not None
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved")
        seen: list[bool] = []
        run.optimizer.boundaries.append(lambda _: seen.append(pending._updating()))
        asked = threading.Event()
        flush, step = engine.store.flush, engine.step

        def held(*args: Any) -> Any:
            assert asked.wait(60)
            return flush(*args)

        def noted(inputs: Any) -> Any:
            asked.clear()
            found = step(inputs)
            seen.append(pending._updating())
            asked.set()
            return found

        patched.setattr(engine.store, "flush", held)
        patched.setattr(engine, "step", noted)
        try:
            run.steps(1, 3)
        finally:
            asked.set()
            valve.open.set()
        assert seen == [True, False] * 2
        pending.result()


# ---- it fails


def next_step(run: Run) -> None:
    run.steps(run.optimizer.num_steps, run.optimizer.num_steps + 1)


TELLERS: dict[str, Callable[[Run, PendingCheckpoint, Path], object]] = {
    "result": lambda run, pending, at: pending.result(),
    "step": lambda run, pending, at: next_step(run),
    "begin": lambda run, pending, at: run.optimizer.begin_checkpoint(at),
    "save": lambda run, pending, at: run.optimizer.save_checkpoint(at),
    "close": lambda run, pending, at: run.optimizer.close(),
}


@pytest.mark.parametrize("teller", TELLERS)
def test_a_failure_is_told_once_and_the_one_before_stays(
    tmp_path: Path, disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, teller: str
) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        before = run.optimizer.save_checkpoint(tmp_path / "saved")
        run.steps(2, 3)
        with monkeypatch.context() as patch:
            failing(patch)
            pending = ended(run.optimizer.begin_checkpoint(tmp_path / "saved"))
        assert names_in(tmp_path / "saved") == ["step-2"]
        with pytest.raises(CheckpointFailed, match=r"step-3 was not completed .*Input/output error.* unchanged"):
            TELLERS[teller](run, pending, tmp_path / "saved")
        assert run.optimizer.engine.store is not None
        assert run.optimizer.engine.store.last_checkpoint == str(before.directory)
        if teller == "close":
            run.optimizer.close()
            return
        run.optimizer.zero_grad()
        for step in range(3, 5):
            run.steps(step, step + 1)
        assert run.optimizer.begin_checkpoint(tmp_path / "saved").result().step == 5
        assert names_in(tmp_path / "saved") == ["step-5"]


def test_a_failure_does_not_hide_what_went_wrong_before(
    tmp_path: Path, disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch)
    run = Run(**both(disk, memory))

    def trained() -> None:
        with run.optimizer:
            run.steps(0, 1)
            ended(run.optimizer.begin_checkpoint(tmp_path / "saved"))
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        trained()


def test_a_held_block_that_is_damaged_is_found(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved")
        state = next(state for state, _ in pending._part.pending if isinstance(state, HeldFile))
        os.pwrite(os.open(state.name, os.O_WRONLY), b"\xff" * 16, 5000)
        run.steps(2, 2)
        valve.open.set()
        with pytest.raises(CheckpointFailed, match="damaged block") as caught:
            pending.result()
        assert isinstance(caught.value.__cause__, BlockDamaged)
        assert "was not completed" in caplog.text


# ---- it ends with its process


def test_close_waits_and_an_interrupted_close_drops_it(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 1)
        first = run.optimizer.begin_checkpoint(tmp_path / "saved")
        threading.Timer(0.05, valve.open.set).start()
    assert first.done()
    assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [1]
    valve.open.clear()
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved")

        def interrupted(_: float | None = None) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pending._ended, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run.optimizer.close()
        assert list(disk.iterdir()) == [] == list(memory.iterdir())
        valve.open.set()
        with pytest.raises(CheckpointFailed, match="it was dropped"):
            pending.result()
    assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [1]
    assert names_in(tmp_path / "saved") == ["step-1"]


def test_an_optimizer_that_nobody_holds_leaves_it_to_its_thread(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve
) -> None:
    run = Run(**both(disk, memory))
    run.steps(0, 2)
    pending = run.optimizer.begin_checkpoint(tmp_path / "saved")
    weights = run.params
    del run
    gc.collect()
    assert list(disk.iterdir()) == [] == list(memory.iterdir()), "its scratch went with it"
    valve.open.set()
    assert pending.result().step == 2
    with tidegate.AdamW(weights) as other:
        other.load_checkpoint(tmp_path / "saved")


def test_a_forked_child_cannot_wait_for_it(tmp_path: Path, disk: Path, memory: Path, valve: Valve) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 1)
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pending.result()
            except EngineError:
                run.optimizer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        valve.open.set()
        pending.result()


def test_how_far_it_is_can_be_seen(
    tmp_path: Path, disk: Path, memory: Path, valve: Valve, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "tidegate.tiers")
    monkeypatch.setattr(draining, "LOG_INTERVAL_SECONDS", 0.0)
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        pending = run.optimizer.begin_checkpoint(tmp_path / "saved")
        with pytest.raises(TimeoutError, match=rf"step-2 is not complete after 0.01 s: 0 of {pending.total_bytes:,}"):
            pending.result(0.01)
        assert f"pending, 0 of {pending.total_bytes:,}" in repr(pending)
        valve.open.set()
        pending.result()
    assert "bytes while training continues" in caplog.text
    assert f"step-2: 8,192 of {pending.total_bytes:,} bytes in" in caplog.text
    assert "step-2 is complete" in caplog.text
    assert "complete" in repr(pending)


ENDS = """
import sys, torch, tidegate
from tests.agent.optimizer.background import update_in_background
from tidegate.agent.checkpoints import background as drain
at, how = sys.argv[1:]
write = drain.write_state
def slow(*args):
    __import__("time").sleep(0.02)
    write(*args)
drain.write_state = slow
params = [torch.nn.Parameter(torch.ones(4000))]
optimizer = tidegate.AdamW(params, offload=tidegate.Offload(subgroup_numel=500, stride="off"))
if how == "in an update":
    update_in_background(optimizer)
def step():
    params[0].grad = torch.ones(4000)
    optimizer.step()
step()
optimizer.begin_checkpoint(at)
step()
assert not tidegate.find_checkpoints(at)
if how == "with an error":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("then", ["result", "load"])
def test_an_update_that_is_done_but_not_waited_for_holds_up_no_drain(tmp_path: Path, then: str) -> None:
    """`step()` returns before the update is done, and the next `wait` may be the one for the checkpoint."""
    param = torch.nn.Parameter(torch.ones(4000))
    with tidegate.AdamW([param], offload=tidegate.Offload(subgroup_numel=500, stride="off")) as optimizer:
        update_in_background(optimizer)
        param.grad = torch.ones(4000)
        optimizer.step()
        pending = optimizer.begin_checkpoint(tmp_path)
        param.grad = torch.ones(4000)
        optimizer.step()
        if then == "result":
            assert pending.result(60).step == 1
        else:
            with pytest.raises(WeightsMismatch):  # found, complete; the weights went on
                optimizer.load_checkpoint(tmp_path)


@pytest.mark.parametrize("how", ["in an update", pytest.param("with an error", marks=pytest.mark.slow)])
def test_a_process_that_ends_waits_for_it(tmp_path: Path, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, tmp_path, how], timeout=120, check=False)
    assert done.returncode == (3 if how == "with an error" else 0)
    assert [found.step for found in find_checkpoints(tmp_path)] == [1]
