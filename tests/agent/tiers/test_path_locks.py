"""One process at a time, or n: with real processes that wait, fork, and are killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from tests.agent.tiers.neighbour import SPAWN, neighbour
from tests.services import until
from tidegate.agent.tiers.byte_locks import locked_by_other
from tidegate.agent.tiers.path_locks import TierLocks, device_key, lock_directory
from tidegate.errors import LocksUnusable

LONG = 60.0
"""A timeout that no test reaches unless something is broken."""

Turn = tuple[int, float, float, float]
"""Process, when it asked, when it came in, when it left."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def wait_in_line(locks: TierLocks, num_threads: int) -> None:
    until(lambda: locks.native.waiting == num_threads, f"{num_threads} waiting threads")


def take_turns(folder: Path, me: int, slots: int, seconds: float, start: Barrier, results: Any) -> None:
    locks = TierLocks(folder, "device", slots, timeout_seconds=LONG)
    turns: list[Turn] = []
    start.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        asked = time.monotonic()
        with locks.hold():
            came = time.monotonic()
            time.sleep(0.001)  # the use
            turns.append((me, asked, came, time.monotonic()))
    results.put(turns)


def compete(folder: Path, num_processes: int, slots: int, seconds: float) -> list[Turn]:
    start, results = SPAWN.Barrier(num_processes), SPAWN.Queue()
    users = [
        SPAWN.Process(target=take_turns, args=(folder, me, slots, seconds, start, results))
        for me in range(num_processes)
    ]
    for user in users:
        user.start()
    turns = [turn for _ in users for turn in results.get(timeout=LONG)]
    for user in users:
        user.join()
    return sorted(turns, key=lambda turn: turn[2])


def most_at_once(turns: list[Turn]) -> int:
    events = sorted([(came, 1) for _, _, came, _ in turns] + [(left, -1) for *_, left in turns])
    inside, most = 0, 0
    for _, change in events:
        inside += change
        most = max(most, inside)
    return most


def test_eight_processes_take_equal_turns_one_at_a_time(folder: Path) -> None:
    turns = compete(folder, 8, slots=1, seconds=2.0)
    assert most_at_once(turns) == 1
    shares = [sum(who == me for who, *_ in turns) for me in range(8)]
    assert max(shares) <= 2 * min(shares)
    # In line: while one waits, the seven others pass about once each; many more if nobody stood in line.
    passed = [sum(asked < came < mine for _, _, came, _ in turns) for _, asked, mine, _ in turns]
    assert sorted(passed)[len(passed) * 99 // 100] <= 4 * 8


@pytest.mark.parametrize("slots", [2, 3])
def test_no_more_than_n_are_inside_and_n_are(folder: Path, slots: int) -> None:
    assert most_at_once(compete(folder, 4, slots, seconds=0.5)) == slots


def test_reads_and_writes_have_their_own_slots(folder: Path) -> None:
    reads = TierLocks(folder, "device", operation="read", timeout_seconds=0)
    writes = TierLocks(folder, "device", operation="write", timeout_seconds=0)
    with neighbour(folder, operation="write") as other:
        assert other.hold()
        with reads.hold() as reading, writes.hold() as writing:
            assert reading.acquired
            assert not writing.acquired


def test_other_devices_are_other_locks(folder: Path) -> None:
    locks = TierLocks(folder, "another", timeout_seconds=0)
    with neighbour(folder) as other:
        assert other.hold()
        with locks.hold() as held:
            assert held.acquired


def test_a_killed_holder_frees_the_path_at_once(folder: Path, pool: ThreadPoolExecutor) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=LONG)

    def hold() -> tuple[bool, float]:
        with locks.hold() as held:
            return held.acquired, time.monotonic()

    with neighbour(folder) as other:
        assert other.hold()
        waits = pool.submit(hold)
        wait_in_line(locks, 1)
        killed = time.monotonic()
        other.kill()
        acquired, came = waits.result()
        assert acquired
        assert came - killed < 1.0


def test_a_process_killed_in_line_lets_the_next_pass(folder: Path) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=LONG)
    with neighbour(folder, timeout_seconds=LONG) as first, neighbour(folder, timeout_seconds=LONG) as second:
        with locks.hold():
            first.enter()
            first.wait_until_in_line()
            second.enter()
            first.kill()
        assert second.entered()[0]


def test_a_wait_that_is_too_long_ends_without_the_lock_and_is_counted(folder: Path) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=0.1)
    with neighbour(folder) as holder, neighbour(folder, timeout_seconds=LONG) as third:
        assert holder.hold()
        for count in (1, 2):
            with locks.hold() as held:
                assert not held.acquired
                assert 0.1 <= held.waited_seconds < 5.0
            assert locks.timeouts == count
        holder.leave()
        # The place in line that was given up blocks nobody, neither us nor others.
        assert third.hold()
        third.leave()
        until(lambda: not locks.native.queued, "the end of the line")
        with locks.hold() as held:
            assert held.acquired
        assert locks.timeouts == 2


def test_no_timeout_means_no_wait(folder: Path) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=0)
    with neighbour(folder) as other:
        assert other.hold()
        with locks.hold() as held:
            assert not held.acquired
        assert not locks.native.queued


def test_threads_share_what_their_process_has_until_the_last_one_leaves(folder: Path) -> None:
    locks, again = TierLocks(folder, "device", timeout_seconds=0), TierLocks(folder, "device", timeout_seconds=0)
    with neighbour(folder, timeout_seconds=0) as other:
        first, second = locks.hold(), again.hold()
        assert first.__enter__().acquired
        assert second.__enter__().acquired
        first.__exit__(None, None, None)
        assert not other.hold()
        other.leave()
        second.__exit__(None, None, None)
        assert other.hold()


def test_another_process_that_waits_goes_before_more_threads(folder: Path, pool: ThreadPoolExecutor) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=LONG)
    leave = threading.Event()

    def stay() -> None:
        with locks.hold():
            assert leave.wait(LONG)

    def hold() -> float:
        with locks.hold() as held:
            assert held.acquired
            return time.monotonic()

    with neighbour(folder, timeout_seconds=LONG) as other:
        staying = pool.submit(stay)
        until(lambda: locks.native.inside == 1, "the first thread")
        other.enter()
        other.wait_until_in_line()
        late = [pool.submit(hold) for _ in range(2)]
        wait_in_line(locks, 2)
        leave.set()
        assert other.entered()[0]
        assert not any(thread.done() for thread in late)
        left = time.monotonic()
        other.leave()
        assert all(thread.result() > left for thread in late)
        staying.result()


def test_what_a_thread_waits_for_its_own_process_is_neither_limited_nor_counted(
    folder: Path, pool: ThreadPoolExecutor
) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=0.1)
    leave = threading.Event()

    def hold() -> tuple[bool, float]:
        with locks.hold() as held:
            return held.acquired, held.waited_seconds

    def stay() -> None:
        with locks.hold():
            assert leave.wait(LONG)

    with neighbour(folder, timeout_seconds=LONG) as other:
        staying = pool.submit(stay)
        until(lambda: locks.native.inside == 1, "the first thread")
        other.enter()
        other.wait_until_in_line()
        begun = time.monotonic()
        late = pool.submit(hold)
        wait_in_line(locks, 1)
        assert not leave.wait(0.5)
        assert locks.timeouts == 0
        leave.set()
        assert other.entered()[0]
        acquired, waited = late.result()
        assert not acquired
        assert locks.timeouts == 1
        assert 0.1 <= waited <= time.monotonic() - begun - 0.5
        staying.result()


def in_fork(work: Callable[[], Any]) -> Any:
    """What `work` gives in a forked child."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(work()))
    child.start()
    assert ours.poll(LONG)
    child.join()
    return ours.recv()


def is_turnstile_locked(folder: Path) -> bool:
    """Whether this process has the turnstile. A process does not see its own locks, so a forked child looks."""
    with (folder / "device.any.lock").open("r+b") as file:
        return locked_by_other(file.fileno(), 0)


def test_while_a_thread_waits_in_line_no_other_thread_goes_round_it(folder: Path, pool: ThreadPoolExecutor) -> None:
    """The turnstile belongs to the process: a thread that tried it would release it for the one that waits there."""
    locks = TierLocks(folder, "device", timeout_seconds=LONG)

    def hold() -> bool:
        with locks.hold() as held:
            return held.acquired

    with neighbour(folder) as other:
        assert other.hold()
        threads = [pool.submit(hold)]
        until(lambda: locks.native.first, "the turnstile")
        threads.append(pool.submit(hold))
        wait_in_line(locks, 2)
        assert in_fork(lambda: is_turnstile_locked(folder))
        other.leave()
        assert all(thread.result() for thread in threads)
        until(lambda: not locks.native.queued, "the end of the line")
        assert not in_fork(lambda: is_turnstile_locked(folder))
        assert other.hold()


def test_what_interrupts_a_wait_leaves_nothing_behind(folder: Path, pool: ThreadPoolExecutor) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=LONG)

    def interrupt() -> None:
        wait_in_line(locks, 1)
        os.kill(os.getpid(), signal.SIGINT)

    with neighbour(folder) as other:
        assert other.hold()
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt), locks.hold():
            pass
        interrupting.result()
        assert locks.native.waiting == 0
        other.leave()
        with locks.hold() as held:
            assert held.acquired
        assert locks.native.inside == 0
        assert other.hold()


def test_a_wait_for_threads_of_the_same_process_can_be_interrupted(folder: Path, pool: ThreadPoolExecutor) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=LONG)
    leave = threading.Event()

    def stay() -> None:
        with locks.hold():
            assert leave.wait(LONG)

    def interrupt() -> None:
        wait_in_line(locks, 1)
        os.kill(os.getpid(), signal.SIGINT)

    with neighbour(folder, timeout_seconds=LONG) as other:
        staying = pool.submit(stay)
        until(lambda: locks.native.inside == 1, "the first thread")
        other.enter()
        other.wait_until_in_line()
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt), locks.hold():
            pass
        interrupting.result()
        assert (locks.native.inside, locks.native.waiting) == (1, 0)
        leave.set()
        staying.result()
        assert other.entered()[0]


def test_the_native_lock_and_its_users_in_python_share_one_count(folder: Path, pool: ThreadPoolExecutor) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=LONG)
    native = locks.native
    with neighbour(folder, timeout_seconds=0) as other:
        assert other.hold()
        waits = [pool.submit(native.enter, LONG) for _ in range(2)]
        wait_in_line(locks, 2)
        other.leave()
        for entered in waits:
            assert entered.result().acquired
            assert entered.result().waited_seconds > 0
        with locks.hold() as held:
            assert held.acquired
            assert native.inside == 3
        native.leave()
        assert not other.hold()
        other.leave()
        native.leave()
        assert other.hold()
        refused = native.enter(0.0)
        assert not refused.acquired
        assert (refused.failed_errno, refused.failure) == (0, "")


def test_a_forked_child_has_nothing_of_its_parents_lock_and_frees_nothing(folder: Path) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=0.05)
    with neighbour(folder, timeout_seconds=0) as other:
        with locks.hold() as held:
            assert held.acquired

            def child() -> tuple[bool, bool, int]:
                inherited = held.acquired
                with locks.hold() as own:
                    return inherited, own.acquired, locks.timeouts

            assert in_fork(child) == (False, False, 1)
            assert locks.timeouts == 0
            assert held.acquired
            assert not other.hold()
            other.leave()
        assert other.hold()


def test_a_child_forked_inside_leaves_without_freeing(folder: Path) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=0)
    with neighbour(folder, timeout_seconds=0) as other:
        holding = locks.hold()
        assert holding.__enter__().acquired
        assert in_fork(lambda: (holding.__exit__(None, None, None), locks.native.inside)[1]) == 0
        assert not other.hold()
        other.leave()
        holding.__exit__(None, None, None)
        assert other.hold()


def test_a_child_forked_while_threads_wait_can_use_the_locks(folder: Path, pool: ThreadPoolExecutor) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=LONG)

    def hold() -> bool:
        with locks.hold() as held:
            return held.acquired

    with neighbour(folder) as other:
        assert other.hold()
        waits = pool.submit(hold)
        wait_in_line(locks, 1)
        context = mp.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=lambda: theirs.send((hold(), threading.active_count())))
        child.start()
        other.leave()
        assert ours.poll(LONG)
        assert ours.recv()[0]
        assert waits.result()
        child.join()


def test_a_lock_file_that_was_cleaned_up_is_made_anew(folder: Path) -> None:
    locks = TierLocks(folder, "device", timeout_seconds=0)
    with locks.hold():
        pass
    (folder / "device.any.lock").unlink()
    folder.rmdir()
    with locks.hold() as held, neighbour(folder, timeout_seconds=0) as other:
        assert held.acquired
        assert not other.hold()


def test_a_folder_that_others_took_over_stops_no_training(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    locks = TierLocks(folder, "device")
    (folder / "device.any.lock").unlink()
    folder.chmod(0o777)
    for _ in range(2):
        with locks.hold() as held:
            assert not held.acquired
    assert locks.timeouts == 2
    assert [record.getMessage() for record in caplog.records if "mode 0777" in record.getMessage()] == caplog.messages
    assert len(caplog.messages) == 1


def test_files_are_private_and_closed_on_exec(folder: Path) -> None:
    TierLocks(folder, "device")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "device.any.lock").stat().st_mode & 0o777 == 0o600
    opened = [int(link.name) for link in Path("/proc/self/fd").iterdir() if link.resolve().parent == folder]
    assert len(opened) == 1
    assert not os.get_inheritable(opened[0])


def test_the_key_tells_file_systems_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert device_key(tmp_path) == device_key(tmp_path / "a")
    assert device_key(tmp_path) != device_key("/proc")
    assert "/" not in device_key(tmp_path)


def test_the_directory_is_of_the_user_and_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert lock_directory() == Path("/run/user/7/tidegate")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert lock_directory() == Path(f"/tmp/tidegate-{os.geteuid()}")


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


def a_linked_file(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "device.any.lock").symlink_to("/dev/null")


def a_file_open_to_others(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "device.any.lock").touch()
    (folder / "device.any.lock").chmod(0o644)


def a_directory_as_file(folder: Path) -> None:
    (folder / "device.any.lock").mkdir(parents=True)
    folder.chmod(0o700)


def of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, -1)


def a_file_of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "device.any.lock").touch(0o600)
    os.chown(folder / "device.any.lock", 65534, -1)


root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (open_to_others, "mode 0755"),
        (a_link, "is a link"),
        (Path.touch, "File exists"),
        (a_linked_file, "Too many levels of symbolic links"),
        (a_file_open_to_others, "mode 0644"),
        (a_directory_as_file, "Is a directory"),
        pytest.param(of_another_user, "belongs to user 65534", marks=root),
        pytest.param(a_file_of_another_user, "belongs to user 65534", marks=root),
    ],
)
def test_what_is_not_private_is_refused_at_the_start(folder: Path, prepare: Callable[[Path], None], why: str) -> None:
    prepare(folder)
    with pytest.raises(LocksUnusable, match=why) as caught:
        TierLocks(folder, "device")
    assert str(folder) in str(caught.value)
    assert "XDG_RUNTIME_DIR" in str(caught.value)


def test_a_missing_parent_is_refused_too(folder: Path) -> None:
    with pytest.raises(LocksUnusable, match="No such file"):
        TierLocks(folder / "deeper", "device")


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"timeout_seconds": -1.0}, {"timeout_seconds": float("inf")}])
def test_settings_that_cannot_work_are_refused(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TierLocks(folder, "device", **wrong)
