"""The watchdog finds ops that run too long, but does not count the time in which the process was stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.services import ROOT
from tidegate.agent.engine.watchdog import Watchdog

POLL = 0.1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_for(clock: Clock, watchdog: Watchdog, seconds: float, since: float) -> float | None:
    """What the watchdog says at the end of so many seconds of polls."""
    said = None
    for _ in range(round(seconds / POLL)):
        clock.now += POLL
        said = watchdog.stuck_seconds(since)
    return said


def test_an_op_that_runs_longer_than_the_limit_is_found() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    assert run_for(clock, watchdog, 9.9, since=100.0) is None
    assert run_for(clock, watchdog, 0.3, since=100.0) == pytest.approx(10.2)


def test_a_stop_of_the_process_does_not_count() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    assert run_for(clock, watchdog, 4.0, since=99.0) is None
    clock.now += 1000.0
    assert run_for(clock, watchdog, 4.9, since=99.0) is None
    assert run_for(clock, watchdog, 0.3, since=99.0) == pytest.approx(10.2, abs=0.2)


def test_an_op_that_began_after_a_stop_has_all_its_time() -> None:
    clock = Clock()
    watchdog = Watchdog(10.0, clock)
    run_for(clock, watchdog, 1.0, since=100.0)
    clock.now += 1000.0
    run_for(clock, watchdog, 1.0, since=100.0)
    began = clock.now
    assert run_for(clock, watchdog, 9.9, since=began) is None
    assert run_for(clock, watchdog, 0.3, since=began) == pytest.approx(10.2)


@pytest.mark.parametrize(("limit", "grace"), [(10.0, 2.0), (0.5, 0.5)])
def test_an_op_that_was_long_before_the_wait_has_some_time_more(limit: float, grace: float) -> None:
    clock = Clock()
    watchdog = Watchdog(limit, clock)
    assert run_for(clock, watchdog, grace - 0.2, since=0.0) is None
    assert run_for(clock, watchdog, 0.4, since=0.0) == pytest.approx(100.0 + grace + 0.2)


def test_without_an_op_nothing_is_found() -> None:
    clock = Clock()
    watchdog = Watchdog(0.5, clock)
    assert run_for(clock, watchdog, 5.0, since=float("inf")) is None


@pytest.mark.slow
def test_a_process_that_was_stopped_goes_on_with_its_step() -> None:
    """As after Ctrl-Z and fg, or when a batch system suspends a job and resumes it."""
    command = [sys.executable, "-m", "tests.agent.engine.goes_on_after_a_stop"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(5.0)
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert float(said.removeprefix("the op took ")) > 5.0
