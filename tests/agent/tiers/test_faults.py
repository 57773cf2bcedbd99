"""Paths that fail: what can be saved is saved, what is lost is named, and training goes on from a loaded state."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.agent.engine.test_tiered_exactness import Pair, directories
from tests.agent.tiers.faults import (
    Snapshot,
    always,
    break_path,
    flip_bit,
    heal_path,
    in_namespace,
    is_locked,
    lives,
    once,
    require_mounts,
    slow,
    state_file,
    store_of,
    train,
    training,
)
from tests.examples import examples
from tests.services import until
from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.tiers import file_path
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.errors import (
    BlockDamaged,
    CapacityError,
    DataTruncated,
    EngineError,
    KnobError,
    LaneStuckError,
    StateLost,
)
from tidegate.knobs.knobs import Knobs
from tidegate.plan.ops import OpKind
from tidegate.timeline.stall_analysis import exposed_waits
from tidegate.timeline.timeline import Timeline

GOOD, BAD = "good", "bad"
FILE_BYTES = 4096 + 40_960
"""What a subgroup takes on a path."""


def two(tmp_path: Path) -> dict[str, Any]:
    for name in (BAD, GOOD):
        (tmp_path / name).mkdir()
    return {name: PathSettings(directory=tmp_path / name) for name in (BAD, GOOD)}


# ---- writes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENODEV, errno.EROFS, errno.ENOENT])
def test_a_path_that_takes_no_more_writes_is_retired_and_nothing_is_lost(
    tmp_path: Path, code: int, dtype: torch.dtype
) -> None:
    paths = two(tmp_path)
    with training(paths, dtype, tier_split="bad:1,good:1") as pair:
        train(pair, 0, 2)
        break_path(pair.optimizer, BAD, "write", always(code))
        train(pair, 2)
        store = store_of(pair.optimizer)
        attempts = "3 attempts" if code == errno.EIO else "1 attempt"
        assert f"after step 3 in {attempts}: {os.strerror(code)}." in store.retired[BAD]
        assert lives(pair) == {GOOD}
        assert store.paths[GOOD].counters.taken_over_bytes > 0
        # Its lane has one write in flight or two when the path fails.
        assert store.paths[BAD].counters.retries["write"] in ({2, 4} if code == errno.EIO else {0})
        train(pair, 3, 2)
        assert pair.optimizer.effective_knobs()["tier_split"] == "bad:0,good:8"
        pair.assert_same_state()
        assert not is_locked(paths[BAD])


@pytest.mark.parametrize("call", ["open_direct", "reserve"])
def test_a_path_without_room_for_a_new_file_is_retired_and_nothing_is_lost(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush needs a new file if a checkpoint holds the present one and its spare file is missing."""
    with training(two(tmp_path), tier_split="bad:1,good:1") as pair:
        train(pair, 0, 2)
        pair.optimizer.save_checkpoint(tmp_path / "checkpoints")
        bad = store_of(pair.optimizer).storage_path(BAD)
        assert bad._spares
        for subgroup in list(bad._spares):
            bad._discard(bad._spares.pop(subgroup))

        real = getattr(file_path, call)

        def refuse(file: str | int, *args: Any, **named: Any) -> Any:
            name = file if isinstance(file, str) else os.readlink(f"/proc/self/fd/{file}")
            if Path(name).is_relative_to(tmp_path / BAD):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(file, *args, **named)

        monkeypatch.setattr(file_path, call, refuse)
        train(pair, 2, 2)
        assert os.strerror(errno.EMFILE) in store_of(pair.optimizer).retired[BAD]
        assert lives(pair) == {GOOD}
        pair.assert_same_state()


def test_an_error_that_passes_is_tried_again(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1") as pair:
        train(pair, 0)
        for operation in ("read", "write"):
            break_path(pair.optimizer, BAD, operation, once(errno.EIO, times=2))
        train(pair, 1, 2)
        store = store_of(pair.optimizer)
        assert store.paths[BAD].counters.retries == {"read": 2, "write": 2}
        assert not store.retired
        assert lives(pair) == {BAD}


def test_host_memory_keeps_what_no_path_takes(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1,good:1") as pair:
        train(pair, 0)
        for name in (BAD, GOOD):
            break_path(pair.optimizer, name, "write", always(errno.ENODEV))
        train(pair, 1, 3)
        assert set(store_of(pair.optimizer).retired) == {BAD, GOOD}
        assert lives(pair) == {"host"}
        pair.assert_same_state()


def test_what_does_not_fit_on_the_paths_that_are_left_stays_in_host_memory(tmp_path: Path) -> None:
    paths = two(tmp_path)
    paths[GOOD] = PathSettings(directory=tmp_path / GOOD, capacity_bytes=5 * FILE_BYTES)
    with training(paths, tier_split="bad:4,good:4") as pair:
        train(pair, 0)
        break_path(pair.optimizer, BAD, "write", always(errno.ENODEV))
        train(pair, 1, 3)
        residence = pair.optimizer.engine.memory.residence
        assert (residence.count(GOOD), residence.count("host")) == (5, 3)
        pair.assert_same_state()


def test_a_path_that_was_full_takes_state_again_when_some_has_left_it(tmp_path: Path) -> None:
    paths = two(tmp_path)
    with training(paths, tier_split="bad:1,good:1") as pair:
        train(pair, 0)
        store = store_of(pair.optimizer)
        held = dict.fromkeys(store.paths[GOOD].states, GOOD)
        assert store.capacity(held)[GOOD] > len(held)
        store._full.add(GOOD)
        assert store.capacity(held)[GOOD] == len(held)
        subgroup = held.popitem()[0]
        store.remove_other_copies(subgroup, "host")
        assert store.capacity(held)[GOOD] > len(held)
        store.reserve(subgroup, GOOD)


def test_state_that_is_read_from_a_retired_path_leaves_it_with_the_next_flush(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1,good:1", order="alternate", host_cache=300_000) as pair:
        train(pair, 0, 3)
        store_of(pair.optimizer).retire(BAD, "somebody pulled a cable.")
        train(pair, 3, 4)
        assert lives(pair) == {GOOD, "host"}
        residence = pair.optimizer.engine.memory.residence
        assert all(residence[i] == "host" for i in store_of(pair.optimizer).paths[BAD].states)
        pair.assert_same_state()


def test_a_directory_that_somebody_removes(tmp_path: Path) -> None:
    """What is open can be read: it moves to the other path."""
    with training(two(tmp_path), tier_split="bad:1,good:1") as pair:
        train(pair, 0, 2)
        shutil.rmtree(tmp_path / BAD)
        train(pair, 2, 3)
        assert "No such file or directory" in store_of(pair.optimizer).retired[BAD]
        # It was seen before anything was planned to go there.
        assert store_of(pair.optimizer).paths[GOOD].counters.taken_over_bytes == 0
        assert lives(pair) == {GOOD}
        pair.assert_same_state()
    assert not any((tmp_path / GOOD).iterdir())


def test_a_file_that_somebody_removes_is_there_as_long_as_it_is_open(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1") as pair:
        train(pair, 0)
        state_file(pair, BAD).unlink()
        train(pair, 1, 2)
        pair.assert_same_state()


# ---- reads


@pytest.mark.parametrize("how", ["refused", "flipped bit", "truncated"])
@pytest.mark.parametrize("checkpoint", [None, "/checkpoints/step-2"])
def test_state_that_is_lost_is_named_and_a_loaded_one_works(tmp_path: Path, how: str, checkpoint: str | None) -> None:
    paths = two(tmp_path)
    with training(paths, torch.bfloat16, tier_split="bad:1,good:1") as pair:
        train(pair, 0, 2)
        saved = Snapshot.of(pair)
        store_of(pair.optimizer).last_checkpoint = checkpoint
        lost = pair.optimizer.engine.memory.residence.index(BAD)
        cause = damage(pair, how)
        with pytest.raises(StateLost) as raised:
            train(pair, 2)
        error = raised.value
        assert (error.path, error.step, error.checkpoint) == (BAD, 2, checkpoint)
        assert how == "refused" or error.subgroup == lost
        assert isinstance(error.__cause__, cause)
        says = checkpoint or "there is no checkpoint"
        for part in (f"subgroup {error.subgroup} ", "step 2", "path bad", says):
            assert part in str(error)
        with pytest.raises(EngineError, match=r"not usable: StateLost.*Load weights and state"):
            pair.optimizer.state_dict()
        assert not is_locked(paths[BAD])
        pair.optimizer.zero_grad()
        saved.load(pair)
        train(pair, 2, 3)
        # A path that answers with errors is retired; one that had one wrong bit is not.
        assert lives(pair) == ({GOOD} if how == "refused" else {BAD, GOOD})
        pair.assert_same_state()


def damage(pair: Pair, how: str) -> type[Exception]:
    if how == "refused":
        break_path(pair.optimizer, BAD, "read", always(errno.EIO))
        return Exception
    if how == "flipped bit":
        flip_bit(state_file(pair, BAD))
        return BlockDamaged
    os.truncate(state_file(pair, BAD), 8192)
    return DataTruncated


def test_a_bit_that_was_wrong_on_the_way_is_read_again(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1") as pair:
        train(pair, 0, 2)
        counters, file = store_of(pair.optimizer).paths[BAD].counters, state_file(pair, BAD)
        flip_bit(file)
        count = counters.count_retry
        counters.count_retry = lambda operation: (count(operation), flip_bit(file))  # type: ignore[method-assign]
        train(pair, 2, 2)
        assert counters.retries["read"] == 1
        pair.assert_same_state()


def test_reading_a_lost_state_from_outside_says_so(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1") as pair:
        train(pair, 0)
        flip_bit(state_file(pair, BAD))
        with pytest.raises(StateLost, match="after step 1, on path bad"):
            pair.optimizer.state_dict()


# ---- knobs


def test_a_tier_split_that_names_a_retired_path_is_refused(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1,good:1") as pair:
        train(pair, 0)
        break_path(pair.optimizer, BAD, "write", always(errno.EROFS))
        train(pair, 1)
        optimizer = pair.optimizer
        with pytest.raises(KnobError, match=r"names 'bad', which is retired: .*Read-only file system"):
            optimizer.check_knobs(Knobs(tier_split="bad:2,good:1", host_cache=0))
        for split in ("good:1", "bad:0,good:1", "auto", "bad:1,good:1"):
            optimizer.check_knobs(Knobs(tier_split=split, host_cache=0))
        optimizer._set_auto(stride=3.0)
        train(pair, 2)


def test_a_path_that_was_named_alone_leaves_the_split_to_speeds(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1") as pair:
        train(pair, 0)
        break_path(pair.optimizer, BAD, "write", always(errno.EROFS))
        train(pair, 1, 2)
        assert lives(pair) == {GOOD}


def test_knobs_that_need_room_which_is_gone_are_refused(tmp_path: Path) -> None:
    paths = two(tmp_path)
    paths[GOOD] = PathSettings(directory=tmp_path / GOOD, capacity_bytes=5 * FILE_BYTES)
    with training(paths, tier_split="bad:4,good:4") as pair:
        train(pair, 0)
        with pytest.raises(CapacityError, match="good takes 5"):
            pair.optimizer.check_knobs(Knobs(tier_split="good:1", host_cache=0))


# ---- slow and stuck


def test_a_slow_path_raises_its_own_stall_and_gets_less(tmp_path: Path) -> None:
    """What a busy machine adds does not grow with the delay: a delay that it drowns is tried again, longer."""
    for delay in (0.05, 0.2, 0.8):
        (folder := tmp_path / f"{delay}").mkdir()
        causes, longest_update, split = slowed_down(folder, delay)
        if causes and causes <= {"bad:read", "bad:write"} and longest_update < 0.6 * delay and split == "bad:1,good:7":
            break
    assert causes
    assert causes <= {"bad:read", "bad:write"}
    assert longest_update < 0.6 * delay
    assert split == "bad:1,good:7"


def slowed_down(folder: Path, delay: float) -> tuple[set[str], float, object]:
    """Causes of waits of more than 0.6 `delay` in the first step with it; the longest update; the split later on."""
    with training(two(folder), stride="off", tier_split="auto") as pair:
        results: list[Any] = []
        pair.optimizer.observers.append(lambda result, phases: results.append((result, phases)))
        train(pair, 0, 2)
        for operation in ("read", "write"):
            break_path(pair.optimizer, BAD, operation, slow(delay))
        train(pair, 2)
        causes = {cause for cause, seconds in stalls_of(*results[-1]).items() if seconds > 0.6 * delay}
        updates = [span.end - span.start for span in results[-1][0].spans if span.kind is OpKind.CPU_UPDATE]
        train(pair, 3, 6)
        return causes, max(updates), pair.optimizer.effective_knobs()["tier_split"]


def stalls_of(result: Any, phases: Any) -> dict[str, float]:
    deps = {op.id: op.deps for op in result.plan.ops}
    return exposed_waits(Timeline(0, "measured", result.spans, phases.spans, deps))


def test_ctrl_c_while_an_op_waits_on_a_slow_path(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1") as pair:
        train(pair, 0)
        interrupts = iter([signal.SIGINT])

        def slow_and_interrupted() -> float:
            for number in interrupts:
                os.kill(os.getpid(), number)
            return 0.1

        break_path(pair.optimizer, BAD, "write", slow_and_interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(pair, 1)
        assert pair.plain.params[0].step == 1
        assert pair.optimizer.state_dict()["state"][0]["step"] == 2  # the update was finished first


def _delaying() -> DelayInterrupt:
    """The block that delays Ctrl-C now."""
    return signal.getsignal(signal.SIGINT).__self__  # type: ignore[union-attr]


def test_the_second_ctrl_c_does_not_wait_for_the_rest_of_the_update(tmp_path: Path) -> None:
    with training(two(tmp_path), tier_split="bad:1") as pair:
        train(pair, 0)
        saved = Snapshot.of(pair)
        interrupts = iter([False, True])

        def slow_and_interrupted() -> float:
            """Two writes are interrupted, both while the update is under way. Python makes one of two signals that come
            before it has handled the first, so the second is sent when the first was noted."""
            for is_second in itertools.islice(interrupts, 1):
                if is_second:
                    until(lambda: _delaying()._noted, "the first Ctrl-C")
                os.kill(os.getpid(), signal.SIGINT)
            return 0.5

        break_path(pair.optimizer, BAD, "write", slow_and_interrupted)
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            train(pair, 1)
        assert time.monotonic() - begun < 8 * 0.5
        with pytest.raises(EngineError, match="not usable: KeyboardInterrupt"):
            pair.optimizer.state_dict()
        pair.optimizer.zero_grad()
        heal_path(pair.optimizer, BAD, "write")
        saved.load(pair)
        train(pair, 1)


def test_locks_are_seen_from_outside(tmp_path: Path) -> None:
    paths = two(tmp_path)
    with training(paths) as pair:
        locks = store_of(pair.optimizer).paths[BAD]._mover.locks
        assert locks is not None
        with locks.hold():
            assert is_locked(paths[BAD])
        assert not is_locked(paths[BAD])


def test_a_read_that_hangs_is_named_and_close_leaves_its_memory_alone(tmp_path: Path) -> None:
    release = threading.Event()
    try:
        with training(two(tmp_path), tier_split="bad:1,good:1", watchdog_seconds=0.3) as pair:
            train(pair, 0)
            break_path(pair.optimizer, BAD, "read", lambda: release.wait(60) and 0)
            with pytest.raises(LaneStuckError, match=r"Lane bad:read is stuck: fetch \d+ bad"):
                train(pair, 1)
            memory, begun = pair.optimizer.engine.memory, time.monotonic()
            pair.optimizer.close()
            assert time.monotonic() - begun < 5
            assert memory.host_slots
    finally:
        release.set()


def test_a_close_that_is_cut_short_while_a_read_runs_leaves_its_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a handler of the user's that raises while close() waits for the read."""
    release, reads = threading.Event(), threading.Event()

    def hang() -> int:
        reads.set()
        return release.wait(60) and 0

    def cut_short(*_: object) -> None:
        raise TimeoutError("a handler of the user's")

    try:
        with training(two(tmp_path), tier_split="bad:1,good:1") as pair:
            train(pair, 0)
            break_path(pair.optimizer, BAD, "read", hang)
            for param in pair.params:
                param.sum().backward()
            assert reads.wait(60), "lanes read ahead of step()"
            engine = pair.optimizer.engine
            monkeypatch.setattr(engine._executor, "_wait", cut_short)
            with pytest.raises(TimeoutError):
                pair.optimizer.close()
            assert engine.memory.host_slots
            pair.optimizer.close()
            assert engine.memory.host_slots
    finally:
        release.set()


# ---- anything at all

FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["one", "two", "three"]),
        st.sampled_from(["read", "write", "write"]),
        st.integers(0, 12),
        st.sampled_from([errno.EIO, errno.EIO, errno.ENOSPC, errno.ENODEV, errno.EROFS]),
        st.sampled_from([1, 2, 100]),
    ),
    max_size=4,
)


@settings(max_examples=examples(40))
@given(
    faults=FAULTS,
    split=st.sampled_from(["auto", "one:1,two:1,three:1", "one:3,two:1", "three:1"]),
    order=st.sampled_from(["pinned", "alternate"]),
    host_cache=st.sampled_from([0, 150_000]),
    stride=st.sampled_from(["off", 2.0, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_whatever_fails_weights_are_right_or_the_loss_is_said(
    faults: list[tuple[str, str, int, int, int]], split: str, order: Any, host_cache: int, stride: Any, dtype: Any
) -> None:
    """faults: path, operation, after how many transfers, errno, and how many of them fail from then on."""
    with (
        directories(("one", "two", "three")) as paths,
        training(paths, dtype, tier_split=split, order=order, host_cache=host_cache, stride=stride) as pair,
    ):
        saved, lost, step = Snapshot.of(pair), 0, 0
        for path, operation, first, code, count in faults:
            break_path(pair.optimizer, path, operation, after(first, code, count))
        while step < 5:
            try:
                train(pair, step)
            except StateLost:
                lost += 1
                assert lost <= 3 * 100
                with pytest.raises(EngineError, match="StateLost"):
                    pair.optimizer.engine.usability.require()
                pair.optimizer.zero_grad()
                saved.load(pair)
            else:
                step += 1
                if step == 3 and not lost:
                    with suppress(StateLost):
                        saved = Snapshot.of(pair)
        with suppress(StateLost):  # found when it is looked at
            pair.assert_same_state()


def after(first: int, code: int, count: int) -> Any:
    answers = [0] * first + [code] * count
    return lambda: answers.pop(0) if answers else 0


# ---- for real


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "programs"),
    [
        ("read_error", ("losetup", "mkfs.ext4")),
        ("full_device", ("losetup", "mkfs.ext4")),
        ("late_write_error", ("losetup", "mkfs.ext4")),
        ("nowhere_left", ("losetup", "mkfs.ext4")),
        ("hangs", ("losetup", "mkfs.ext4", "fsfreeze")),
        ("throttled", ("losetup", "mkfs.ext4")),
        ("small_path", ()),
        ("cannot_start", ()),
    ],
)
def test_file_systems_that_really_fail(scenario: str, programs: tuple[str, ...], tmp_path: Path) -> None:
    require_mounts(*programs)
    in_namespace(scenario, tmp_path)
