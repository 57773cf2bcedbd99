"""SIGKILL at random moments: the newest complete checkpoint always resumes, and the result is the oracle's."""

from __future__ import annotations

import multiprocessing as mp
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from tests.agent.checkpoints.victim import Places, live, uninterrupted
from tidegate.agent.tiers.path_locks import TierLocks, device_key
from tidegate.agent.tiers.scratch import find_leftovers, remove

LONGEST_LIFE_SECONDS = 0.5
FORKS = mp.get_context("forkserver")
# What takes seconds to import, once for all lives; torch imports the second when an optimizer is first built.
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "tidegate.agent.optimizer.adamw"])


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-kill-") as memory:
        for name in ("disk", "checkpoints", "runtime"):
            (tmp_path / name).mkdir(mode=0o700)
        yield Places(tmp_path / "disk", Path(memory), tmp_path / "checkpoints", tmp_path / "runtime", tmp_path / "log")


class Story:
    """What the lives have logged, held against the oracle."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._oracle = uninterrupted()
        self._expected: list[str] = []
        self.insides: Counter[str] = Counter()
        self.lives_inside = 0
        """Those that were killed inside something."""
        self.resumed: list[int] = []
        self.steps = 0

    def lines(self) -> list[str]:
        """Of the present life."""
        return self._places.log.read_text().splitlines() if self._places.log.exists() else []

    def end_life(self) -> None:
        """Holds what it has done against the oracle, and notes what it was inside of when it ended."""
        inside: Counter[str] = Counter()
        saved = self.resumed[-1] if self.resumed else 0
        for line in self.lines():
            word, *rest = line.split()
            if word in "+-":
                inside[rest[0]] += 1 if word == "+" else -1
            elif word in ("resumed", "step"):
                self.steps += word == "step"
                assert rest[1] == self.expected(int(rest[0])), line
                if word == "resumed":
                    # What was said to be saved is there; what was about to be may be, too: the next one begins only
                    # when one that is drained is complete.
                    assert self._newest <= int(rest[0]) <= self._newest + self._pending, (line, self._newest)
                    self.resumed.append(saved := int(rest[0]))
            elif word == "saved":
                saved = int(rest[0])
        found = {name for name, number in inside.items() if number}
        self.insides.update(found or {"elsewhere"})
        self.lives_inside += bool(found)
        self._newest, self._pending = saved, 3 if inside["checkpoint"] or inside["drain"] else 0
        self._places.log.unlink()

    _newest = _pending = 0

    def expected(self, step: int) -> str:
        self._expected += islice(self._oracle, max(0, step + 1 - len(self._expected)))
        return self._expected[step]


def run_and_kill(places: Places, times: int, seed: int, inside: int = 0) -> Story:
    """`times` kills, and more (up to three times as many) until so many were `inside` something, one of them a drain,
    and there were two steps for each of `times`: what they hit depends on how fast the machine is."""
    chance, story = random.Random(seed), Story(places)
    for life in range(3 * times):
        enough = story.lives_inside >= inside and story.insides["drain"] and story.steps > 2 * times
        if life >= times and enough:
            break
        process = FORKS.Process(target=live, args=(places, life, 10**9))
        process.start()
        wait_for("saved" if life == 0 else "resumed", story, process)
        time.sleep(chance.uniform(0, LONGEST_LIFE_SECONDS))
        assert process.exitcode is None, f"life {life} ended by itself"
        process.kill()
        process.join()
        story.end_life()
        check_nothing_is_held(places)
    return story


def wait_for(word: str, story: Story, process: mp.process.BaseProcess) -> None:
    for _ in count():
        if any(line.startswith(word) for line in story.lines()):
            return
        assert process.exitcode is None, f"the process ended with {process.exitcode} before it {word}"
        time.sleep(0.005)


def check_nothing_is_held(places: Places) -> None:
    """The dead run's scratch is known to be dead and can be removed; its locks are free at once."""
    for path in (places.disk, places.memory):
        (left,) = find_leftovers(path)
        assert left.alive == "no"
        remove(left)
        assert list(path.iterdir()) == []
        locks = TierLocks(places.runtime / "tidegate", device_key(path))
        with locks.hold() as held:
            assert held.acquired
            assert held.waited_seconds < 0.5


def finish(places: Places, story: Story) -> None:
    """One more life, to its end: the state goes on as if nothing had been."""
    process = FORKS.Process(target=live, args=(places, len(story.resumed), story._newest + 7))
    process.start()
    process.join()
    assert process.exitcode == 0
    lines = story.lines()
    assert lines[-1] == "done"
    story.end_life()
    assert f"step {story.resumed[-1] + 1}" in "\n".join(lines)
    for path in (places.disk, places.memory):
        assert list(path.iterdir()) == []
    assert len(list(places.checkpoints.iterdir())) == 1, "remains of interrupted checkpoints"


@pytest.mark.slow
def test_killed_ten_times(places: Places) -> None:
    story = run_and_kill(places, 10, seed=7, inside=5)
    assert story.lives_inside >= 5, story.insides
    assert story.insides["drain"] > 0, story.insides
    assert story.steps > 20
    finish(places, story)


@pytest.mark.torture
def test_killed_two_hundred_times(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    story = run_and_kill(places, 200, seed=int(time.time()))
    with capsys.disabled():
        print(
            f"\n200 kills, {story.steps} steps, {time.monotonic() - began:.0f} s, inside: {dict(story.insides)}: "
            f"{len(story.resumed)} resumed, all equal to the oracle"
        )
    assert story.insides["elsewhere"] <= 100, story.insides
    assert story.insides["drain"] > 10, story.insides
    finish(places, story)
