"""Deferred flushes: `step()` returns before them, and whatever comes next finds weights and state as without them."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.deferring import deferring
from tests.agent.engine.test_exactness import backward, random_grads
from tests.agent.engine.test_tiered_exactness import Event, Pair
from tests.agent.tiers.faults import Snapshot, always, break_path, lives, once, slow, store_of, train, training
from tidegate.agent.engine.buffers import GradientBuffer
from tidegate.agent.engine.planning_inputs import IdleTime
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.agent.telemetry.report import report_of
from tidegate.agent.telemetry.step_sums import step_sums
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.errors import StateLost
from tidegate.knobs.knobs import Knobs
from tidegate.timeline.stall_analysis import exposed_waits
from tidegate.timeline.step_record import FinishedStep
from tidegate.timeline.step_result import StepPhases, StepResult

ROOT = Path(__file__).resolve().parents[3]
OFF = {"stride": "off", "gradients": "release", "subgroup_numel": 2000}
"""All on the CPU, in 20 subgroups."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def deferred_training(tmp_path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Iterator[Pair]:
    """An optimizer with its oracle, whose last step has deferred flushes: `is_deferring` tells whether it still has."""
    paths = {name: PathSettings(directory=tmp_path / name) for name in ("good", "bad")}
    for path in paths.values():
        Path(path.directory).mkdir()
    with deferring(), training(paths, dtype, **{**OFF, "tier_split": "good:1", **changes}) as pair:
        train(pair, 0, 2)
        assert is_deferring(pair)
        yield pair


def is_deferring(pair: Pair) -> bool:
    flight = pair.optimizer.engine._flight
    return flight is not None and flight.has_returned and bool(flight.plan.deferred_flushes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    with deferred_training(tmp_path, dtype) as pair:
        train(pair, 2, 4)
        assert is_deferring(pair)
        pair.assert_same_state()
        assert lives(pair) == {"good"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["knobs", "add", "skip", "round trip", "edit", "edit data", "read", "drop"])
def test_whatever_happens_after_a_step_finds_it_done(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    knobs = Knobs(stride=2.0, host_cache=60_000, order="alternate", tier_split="good:1,bad:1")
    with deferred_training(tmp_path, dtype) as pair:
        for step in range(2, 5):
            pair.happens(Event(kind, step, knobs))
            pair.train(step, micro_batches=2, some=False, skip=kind == "skip")
        pair.assert_same_state()


def test_the_weights_are_there_when_step_returns_and_edits_after_it_count(tmp_path: Path) -> None:
    with deferred_training(tmp_path, torch.bfloat16) as pair:
        break_path(pair.optimizer, "good", "write", slow(0.2))
        pair.train(2, micro_batches=1, some=False, skip=False)  # compares the weights
        assert pair.optimizer.engine.updating
        pair.happens(Event("edit", 0, Knobs()))
        train(pair, 3, 2)
        pair.assert_same_state()


def test_observers_get_the_result_when_the_flushes_are_done(tmp_path: Path) -> None:
    results: list[tuple[StepResult, StepPhases]] = []
    with deferred_training(tmp_path) as pair:
        pair.optimizer.observers.append(lambda *result: results.append(result))
        train(pair, 2)
        before = len(results)
        pair.optimizer.wait()
        assert len(results) == before + 1
        result, phases = results[-1]
        flushed = [span for span in result.spans if span.op in result.plan.deferred_flushes]
        assert len(flushed) == len(result.plan.deferred_flushes) > 0
        assert result.update_end <= phases.spans[-1].end
        step = FinishedStep(
            number=3, result=result, phases=phases, deps={op.id: op.deps for op in result.plan.ops},
            host_bytes={}, subgroups={},
        )  # fmt: skip
        report = report_of(step)
        assert report.spill_seconds == 0.0
        assert len(result.waited_spans) == len(result.spans) - len(flushed)

        # The update does not wait for these flushes, even if they are the last ops and begin in it.
        low, high = step.monotonic_timeline.window("update") or (0.0, 0.0)
        spans = tuple(span._replace(start=low, end=high + 1.0) if span in flushed else span for span in result.spans)
        early = replace(step, result=replace(result, spans=spans))
        expected = exposed_waits(replace(early.monotonic_timeline, spans=result.waited_spans))
        assert step_sums(early).waits == expected != exposed_waits(early.monotonic_timeline)


def test_a_gradient_that_waits_for_a_slow_flush_waits_for_the_path(tmp_path: Path) -> None:
    with deferred_training(tmp_path) as pair:
        recorder = Recorder(pair.optimizer)
        pair.optimizer.observers.append(recorder.record)
        train(pair, 2)
        break_path(pair.optimizer, "good", "write", slow(0.3))
        train(pair, 3, 2)  # the gradients of the second one wait
        pair.optimizer.wait()
        last = recorder.totals.last
        assert last is not None
        stalled = {row.cause: row.seconds for row in last.stalls if row.phase == "backward"}
        assert stalled["good:write"] > 0.1
        assert sum(stalled.values()) == pytest.approx(last.exposed_seconds["backward"])
        assert all(seconds >= 0.0 for seconds in stalled.values())


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENODEV])
def test_a_path_that_fails_in_deferred_flushes_loses_nothing(tmp_path: Path, code: int) -> None:
    with deferred_training(tmp_path) as pair:
        break_path(pair.optimizer, "good", "write", always(code))
        train(pair, 2)
        assert lives(pair) == {"bad"}
        train(pair, 3, 2)
        assert set(store_of(pair.optimizer).retired) == {"good"}
        pair.assert_same_state()


def test_host_memory_keeps_what_no_path_takes_any_more(tmp_path: Path) -> None:
    with deferred_training(tmp_path) as pair:
        for name in ("good", "bad"):
            break_path(pair.optimizer, name, "write", always(errno.ENODEV))
        train(pair, 2, 3)
        assert lives(pair) == {"host"}
        pair.assert_same_state()


def test_what_fails_for_a_moment_is_written_in_another_attempt(tmp_path: Path) -> None:
    with deferred_training(tmp_path) as pair:
        break_path(pair.optimizer, "good", "write", once(errno.EIO, times=2))
        train(pair, 2, 2)
        pair.assert_same_state()
        assert not store_of(pair.optimizer).retired


def test_state_that_cannot_be_read_into_a_deferred_slot_is_named_and_a_loaded_state_goes_on(tmp_path: Path) -> None:
    with deferred_training(tmp_path) as pair:
        saved = Snapshot.of(pair)
        pair.optimizer.wait()
        reads = itertools.count()
        last = len(pair.optimizer.engine.subgroups) - 1
        break_path(pair.optimizer, "good", "read", lambda: errno.EIO if next(reads) >= last else 0)
        with pytest.raises(StateLost):
            train(pair, 2)
        del store_of(pair.optimizer).paths["good"]._mover.pool.faults["read"]  # type: ignore[attr-defined]
        saved.load(pair)
        train(pair, 2, 2)
        pair.assert_same_state()


@pytest.mark.parametrize("end", ["close", "checkpoint", "state_dict", "zero_grad to zeros", "new optimizer"])
def test_what_ends_or_reads_waits_for_them(tmp_path: Path, end: str) -> None:
    ends: dict[str, Callable[[Pair], Any]] = {
        "close": lambda pair: pair.optimizer.close(),
        "checkpoint": lambda pair: pair.optimizer.save_checkpoint(tmp_path / "saved"),
        "state_dict": lambda pair: pair.optimizer.state_dict(),
        "zero_grad to zeros": lambda pair: pair.optimizer.zero_grad(set_to_none=False),
        "new optimizer": lambda pair: tidegate.AdamW(pair.params).close(),
    }
    with deferred_training(tmp_path) as pair:
        break_path(pair.optimizer, "good", "write", slow(0.05))
        train(pair, 2)
        assert pair.optimizer.engine.updating
        ends[end](pair)
        assert not pair.optimizer.engine.updating
        assert pair.plain.same_weights(pair.params)


def test_a_checkpoint_after_a_step_with_them_is_whole(tmp_path: Path) -> None:
    with deferred_training(tmp_path) as pair:
        pair.optimizer.save_checkpoint(tmp_path / "saved")
        kept = Snapshot.of(pair)
        train(pair, 2, 2)
        with torch.no_grad():
            for param, weight in zip(pair.params, kept.weights, strict=True):
                param.copy_(weight)
        pair.optimizer.load_checkpoint(tmp_path / "saved")
        pair.plain.params = kept.plain
        pair.assert_same_state()
        train(pair, 2, 2)
        pair.assert_same_state()


def test_the_first_gradient_of_another_thread_waits_for_them(tmp_path: Path) -> None:
    with deferred_training(tmp_path) as pair:
        break_path(pair.optimizer, "good", "write", slow(0.05))
        train(pair, 2)
        grads = random_grads(pair.params, 3, some=False)
        thread = threading.Thread(target=backward, args=(pair.params, grads))
        thread.start()
        thread.join()
        pair.optimizer.step()
        pair.plain.step(grads)
        assert pair.plain.same_weights(pair.params)
        pair.assert_same_state()


def test_they_take_no_memory_beyond_that_of_gradients(tmp_path: Path) -> None:
    with deferred_training(tmp_path) as pair:
        pair.optimizer.wait()
        deferred = pair.optimizer.engine.memory.host_bytes()
        with deferring(0.0):
            train(pair, 2, 2)
            assert not is_deferring(pair)
            assert pair.optimizer.engine.memory.host_bytes() == deferred


@pytest.mark.parametrize("changes", [{"gradients": "keep"}, {"policy": "sequential"}, {"stride": 1.0}])
def test_other_settings_defer_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    with deferring(), training({"disk": tmp_path}, **{**OFF, **changes}) as pair:
        train(pair, 0, 3)
        assert not pair.optimizer.engine.running
        pair.assert_same_state()


def test_a_process_that_ends_after_a_step_ends_in_order(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.agent.engine.deferring import deferring
from tests.agent.engine.test_deferred_flushes import OFF, is_deferring
from tests.agent.tiers.faults import break_path, slow, train, training
with deferring():
    held = training({{"disk": Path({str(tmp_path)!r})}}, **OFF)
    pair = held.__enter__()
    train(pair, 0, 2)
    break_path(pair.optimizer, "disk", "write", slow(0.05))
    train(pair, 2)
    print(is_deferring(pair), pair.optimizer.engine.updating)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True True"), done.stderr


def test_the_buffer_for_gradients_does_not_follow_each_small_change() -> None:
    sizes: list[int] = []

    def new(nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    buffer = GradientBuffer(new)
    for nbytes in (100, 90, 100, 50, 110, 60, 54, 0):
        buffer.resize(nbytes)
    assert sizes == [100, 110, 54]
    assert buffer.nbytes == 0


# ---- how long paths are idle


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([0.3] * (IdleTime.STEPS - 1), 0.0),
        ([0.3] * IdleTime.STEPS, 0.2973),
        ([0.25] * IdleTime.STEPS, 0.25),
        ([*[0.3] * 4, 0.0, 9.0, 0.3], 0.2973),
        ([*[0.3] * 5, *[0.37] * 5], 0.2973),
        ([*[0.3] * 5, *[0.4] * 5], 0.3856),
        ([*[0.3] * 5, *[0.5] * 5], 0.5),
        ([*[0.3] * 5, *[0.29] * 3], 0.2726),
        ([*[0.3] * 5, *[IdleTime.LEAST_SECONDS / 2] * 3], 0.0),
    ],
)  # fmt: skip
def test_the_idle_time_that_plans_expect(seen: list[float], expected: float) -> None:
    idle = IdleTime()
    for seconds in seen:
        idle.observe(seconds)
    assert idle.seconds == pytest.approx(expected, abs=1e-4)


def test_the_idle_time_lasts_until_the_next_gradient() -> None:
    idle, seen = IdleTime(), list[float]()
    idle.observe = seen.append  # type: ignore[method-assign]
    idle.ended()
    assert not seen
    idle.began()
    idle.ended()
    idle.ended()
    assert len(seen) == 1
    assert seen[0] >= 0.0
    idle.began()
    idle.forget()
    idle.ended()
    assert len(seen) == 1
