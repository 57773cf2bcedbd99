"""What TierStore, engine and telemetry rely on, for every kind of storage path. A new kind is one more entry of `KINDS`
in `path_kinds.py`; each test then holds for it."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.agent.tiers.path_kinds import KINDS, Medium
from tests.services import until
from tidegate.agent.tiers.object_settings import LEAST
from tidegate.agent.tiers.state_file import StateKind, padded_bytes
from tidegate.agent.tiers.tier_store import _path
from tidegate.agent.tiers.transfers import Transfer
from tidegate.errors import BlockDamaged, ConfigError, DataTruncated, PathFailed, PathFull
from tidegate.kernels import IoPool, aligned_buffer

NUMEL, STATE_BYTES = 5_000, 8
NBYTES = NUMEL * STATE_BYTES
PADDED = padded_bytes(NBYTES)
NONE = {"read": 0, "write": 0}


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def medium(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Medium]:
    with request.param(tmp_path_factory.mktemp("medium")) as made:
        yield made


@pytest.fixture
def place() -> str:
    return f"place-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def path(medium: Medium, place: str) -> Iterator[Any]:
    """A path that holds subgroups 0 and 1; nothing was written yet."""
    with closing(opened(medium, place)) as made:
        for subgroup in range(2):
            made.make(kind(subgroup))
        yield made


def opened(medium: Medium, place: str, **changes: Any) -> Any:
    return _path("mine", medium.settings(place, **changes), uuid.uuid4(), 0)


def kind(subgroup: int = 0, numel: int = NUMEL) -> StateKind:
    return StateKind("adamw", 0, subgroup, numel, 1, STATE_BYTES)


def state(seed: int, nbytes: int = NBYTES) -> Any:
    found: Any = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return found


def write(path: Any, subgroup: int, step: int, sent: Any) -> Transfer:
    """Writes from memory that has other content as soon as `write` returns."""
    memory = aligned_buffer(padded_bytes(len(sent)))
    memory[: len(sent)] = sent
    moved: Transfer = path.write(subgroup, memory.ctypes.data, step)
    memory[:] = 0xAA
    return moved


def read(path: Any, subgroup: int, nbytes: int = NBYTES) -> Any:
    memory = aligned_buffer(padded_bytes(nbytes))
    memory[:] = 0x55
    path.read(subgroup, memory.ctypes.data)
    return memory[:nbytes]


def told(path: Any, operation: str, subgroup: int, step: int = 1) -> list[tuple[bool, list[str]]]:
    """Each time that `begun` was called: whether the path was busy, and with what."""
    memory, found = aligned_buffer(PADDED), []

    def begun() -> None:
        found.append((path.busy, [what for what, _ in path.counters.under_way.values()]))

    if operation == "write":
        path.write(subgroup, memory.ctypes.data, step, begun)
    else:
        path.read(subgroup, memory.ctypes.data, begun)
    return found


# ---- state


@pytest.mark.parametrize("numel", [1, 512, 2048, 2049, NUMEL])
def test_what_was_written_is_read_bit_for_bit(medium: Medium, place: str, numel: int) -> None:
    nbytes = numel * STATE_BYTES
    with closing(opened(medium, place)) as path:
        path.make(kind(7, numel))
        for step in (1, 2, 5):
            sent = state(step, nbytes)
            moved = write(path, 7, step, sent)
            assert (moved.nbytes, path.states[7].step) == (padded_bytes(nbytes), step)
            assert moved.start <= moved.end
            for _ in range(2):
                assert np.array_equal(read(path, 7, nbytes), sent)


def test_state_that_was_never_written_is_zeros_and_moves_nothing(path: Any) -> None:
    assert path.states[0].step == -1
    assert not read(path, 0).any()
    memory = aligned_buffer(PADDED)
    assert path.read(0, memory.ctypes.data).nbytes == 0
    assert path.counters.bytes == NONE


def test_state_that_is_forgotten_is_zeros_until_it_is_written_again(path: Any) -> None:
    write(path, 0, 1, state(1))
    write(path, 1, 1, state(2))
    path.forget(0)
    assert (path.states[0].step, read(path, 0).any()) == (-1, False)
    assert np.array_equal(read(path, 1), state(2))
    write(path, 0, 3, state(3))
    assert np.array_equal(read(path, 0), state(3))


def test_what_is_removed_is_gone_and_leaves_its_room(medium: Medium, place: str) -> None:
    with closing(opened(medium, place, capacity_bytes=1 << 20)) as path:
        path.make(kind(0))
        write(path, 0, 1, state(1))
        room, stored = path.free_bytes, medium.stored(place)
        path.make(kind(1))
        assert path.free_bytes <= room - PADDED, "state that was not written yet takes room"
        write(path, 1, 1, state(2))
        path.remove(1)
        assert (path.free_bytes, list(path.states)) == (room, [0])
        until(lambda: sorted(medium.stored(place)) == sorted(stored), "what was removed is deleted")
        assert np.array_equal(read(path, 0), state(1))
        path.make(kind(1))
        assert not read(path, 1).any(), "it begins with zeros again"


def test_what_is_not_there_any_more_can_be_removed(medium: Medium, path: Any) -> None:
    write(path, 0, 1, state(1))
    write(path, 1, 1, state(2))
    medium.lose(path, 0)
    path.remove(0)
    assert (list(path.states), np.array_equal(read(path, 1), state(2))) == ([1], True)


def test_room_is_bounded_by_the_settings_or_the_medium(medium: Medium, place: str) -> None:
    with closing(opened(medium, place)) as path:
        assert path.capacity_bytes is None or path.capacity_bytes > path.free_bytes > 0
    with closing(opened(medium, place, capacity_bytes=PADDED // 2)) as path:
        assert (path.capacity_bytes, path.free_bytes) == (PADDED // 2, PADDED // 2)


# ---- what goes wrong


def test_damage_is_found_and_named(medium: Medium, path: Any) -> None:
    for subgroup in range(2):
        write(path, subgroup, 1, state(subgroup))
    medium.damage(path, 0)
    with pytest.raises(BlockDamaged):
        read(path, 0)
    assert path.counters.errors["read"] >= 1
    assert np.array_equal(read(path, 1), state(1))
    write(path, 0, 2, state(5))
    assert np.array_equal(read(path, 0), state(5))


def test_state_whose_end_is_missing_is_found_and_named(medium: Medium, path: Any) -> None:
    write(path, 0, 1, state(1))
    medium.cut(path, 0)
    with pytest.raises(DataTruncated):
        read(path, 0)


def test_a_refusal_that_passes_is_tried_again(medium: Medium, path: Any) -> None:
    medium.refuse(path, "write", medium.passing, times=1)
    write(path, 0, 1, state(1))
    medium.heal(path, "write")
    medium.refuse(path, "read", medium.passing, times=1)
    assert np.array_equal(read(path, 0), state(1))
    medium.heal(path, "read")
    assert path.counters.retries == path.counters.errors == {"read": 1, "write": 1}
    assert path.counters.bytes == {"read": PADDED, "write": PADDED}


def test_a_write_that_fails_is_named_and_the_state_of_others_stays(medium: Medium, path: Any) -> None:
    write(path, 1, 1, state(1))
    refusals = [(medium.broken, PathFailed), (medium.full, PathFull)]
    for step, (answer, cause) in enumerate((a, c) for a, c in refusals if a is not None):
        medium.refuse(path, "write", answer)
        nbytes, errors = dict(path.counters.bytes), path.counters.errors["write"]
        with pytest.raises(cause, match="subgroup 0") as failed:
            write(path, 0, 2 + step, state(2))
        medium.heal(path, "write")
        if isinstance(failed.value, PathFailed):
            assert (failed.value.path, failed.value.subgroup, failed.value.errno > 0) == ("mine", 0, True)
        assert (path.counters.bytes, path.counters.errors["write"] > errors) == (nbytes, True)
        assert (path.busy, path.counters.under_way) == (False, {}), "no thread uses the memory any more"
        assert np.array_equal(read(path, 1), state(1))
        write(path, 0, 9, state(3))
        assert np.array_equal(read(path, 0), state(3)), "once the medium is well"


def test_a_read_that_fails_is_named_and_the_state_stays(medium: Medium, path: Any) -> None:
    write(path, 0, 1, state(1))
    medium.refuse(path, "read", medium.broken)
    with pytest.raises(PathFailed, match="subgroup 0") as failed:
        read(path, 0)
    medium.heal(path, "read")
    assert (failed.value.path, failed.value.subgroup, failed.value.errno > 0) == ("mine", 0, True)
    assert (path.busy, path.counters.bytes["read"], path.counters.errors["read"] > 0) == (False, 0, True)
    assert (path.states[0].step, np.array_equal(read(path, 0), state(1))) == (1, True)


@pytest.mark.parametrize("name", LEAST)
def test_settings_out_of_their_bounds_are_refused(medium: Medium, place: str, name: str) -> None:
    found = medium.settings(place)
    assert (found.block_bytes, place in found.location) == (16384, True)
    with pytest.raises(ConfigError, match=f"{name}={LEAST[name] - 1}"):
        replace(found, **{name: LEAST[name] - 1})


# ---- several at once, and figures


def test_several_threads_move_the_state_of_several_subgroups(medium: Medium, place: str) -> None:
    with closing(opened(medium, place)) as path, ThreadPoolExecutor(4) as threads:
        for subgroup in range(8):
            path.make(kind(subgroup))

        def there_and_back(subgroup: int) -> bool:
            for step in range(1, 4):
                write(path, subgroup, step, state(10 * subgroup + step))
                if not np.array_equal(read(path, subgroup), state(10 * subgroup + step)):
                    return False
            return True

        assert all(threads.map(there_and_back, range(8)))
        assert path.counters.bytes == {"read": 24 * PADDED, "write": 24 * PADDED}
        assert (path.busy, path.lock_timeouts) == (False, 0)
        assert path.lock_slots in (0, path.settings.lock_slots)


def test_the_lane_is_told_when_all_blocks_are_queued(path: Any) -> None:
    assert told(path, "write", 0) == [(True, ["write"])]
    assert told(path, "read", 0) == [(True, ["read"])]
    assert not path.busy


def test_every_transfer_is_counted_once(path: Any) -> None:
    moved = [write(path, 0, 1, state(1)), write(path, 1, 1, state(2))]
    read(path, 0)
    assert path.counters.bytes == {"read": PADDED, "write": 2 * PADDED}
    assert [operation for operation, _ in path.counters.moves] == ["write", "write", "read"]
    assert [one for _, one in itertools.islice(path.counters.moves, 2)] == moved
    assert min(path.counters.lock_wait_seconds.values()) >= 0
    assert path.counters.retries == path.counters.errors == NONE


def test_calibration_measures_is_not_counted_and_leaves_nothing(medium: Medium, place: str) -> None:
    with closing(opened(medium, place)) as path:
        before = sorted(medium.stored(place))
        speeds = path.calibrate(100_000)
        assert min(speeds.read_bytes_per_second, speeds.write_bytes_per_second) > 0
        assert (path.counters.bytes, list(path.counters.moves), path.states) == (NONE, [], {})
        until(lambda: sorted(medium.stored(place)) == before, "what was measured with is deleted")


# ---- checkpoints


def test_state_that_a_checkpoint_holds_stays_while_training_goes_on(medium: Medium, path: Any) -> None:
    if not medium.holds:
        pytest.skip("checkpoints copy state on this kind of path")
    write(path, 0, 1, state(1))
    held, memory = path.hold(0, 7), aligned_buffer(PADDED)
    path.add_spare(0)
    assert path.has_spare(0)
    write(path, 0, 2, state(2))
    assert (path.has_spare(0), path.states[0].step, held.header.step) == (False, 2, 1)
    with closing(held), closing(IoPool(1)) as pool:
        held.load(pool, 0, PADDED, memory.ctypes.data)
    assert np.array_equal(memory[:NBYTES], state(1))
    assert np.array_equal(read(path, 0), state(2))


# ---- the end


def test_what_is_closed_leaves_nothing_and_can_be_closed_again(medium: Medium, place: str) -> None:
    path = opened(medium, place)
    for subgroup in range(3):
        path.make(kind(subgroup))
        write(path, subgroup, 1, state(subgroup))
    assert len(medium.stored(place)) >= 3
    for _ in range(2):
        path.close()
        assert medium.stored(place) == []


def test_a_child_that_was_forked_takes_nothing_away(medium: Medium, path: Any, place: str) -> None:
    write(path, 0, 1, state(1))
    stored = sorted(medium.stored(place))
    child = os.fork()
    if not child:
        path.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(medium.stored(place)) == stored
    assert np.array_equal(read(path, 0), state(1))
