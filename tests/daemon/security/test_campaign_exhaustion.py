"""Disks that fill up and descriptors that run out, again and again: nothing acknowledged is lost, all goes on after."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.daemon.live import Agent, wait_until
from tests.daemon.security.test_connections import SILENT, connect, few_descriptors, refused
from tests.daemon.storage.test_state_directory import on_small_disk, patch, ready

pytestmark = pytest.mark.torture

FILLINGS = 6
CHANGES = 100
"""With a full disk."""
CHANGES_AFTER = 5
"""Once there is room again. SQLite keeps them in its log, for which the disk of 1 MiB has to have room, too."""
ROUNDS = 8


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root, unshare")
def test_a_disk_that_fills_up_again_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, answers = 0, Counter[int]()
    with on_small_disk(tmp_path / "state") as (daemon, seen):
        agent = Agent(daemon, "llama")
        agent.client.goodbye(agent.id)
        for turn in range(FILLINGS):
            with contextlib.suppress(OSError), (seen / "fill").open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 4096)
            codes = [patch(daemon, "llama", 2 + (turn + n) % 7)[0] for n in range(CHANGES)]
            (seen / "fill").unlink()
            wait_until(lambda: ready(daemon)[0] == 200, "a daemon that is ready again")
            codes += [patch(daemon, "llama", 9 + n % 7)[0] for n in range(CHANGES_AFTER)]
            answers.update(codes)
            made += sum(code in (200, 202) for code in codes)
            assert daemon.client().knobs("llama").generation == made, "what was acknowledged is kept, and nothing else"
    with capsys.disabled():
        print(f"\n{FILLINGS} times a full disk, {answers.total()} changes: {dict(answers)}, {made} made and kept")
    assert set(answers) <= {200, 202, 503}
    assert answers[503], "the disk was never full"
    assert made >= FILLINGS * CHANGES_AFTER, "with room again all are made"


def test_descriptors_that_run_out_again_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * SILENT)), hard))
    answered = 0
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        daemon, _ = stack.enter_context(few_descriptors(tmp_path))
        agent = Agent(daemon, "llama")
        for _ in range(ROUNDS):
            with contextlib.ExitStack() as idle:
                for number in range(SILENT):
                    idle.enter_context(connect(daemon))
                    if number % 100 == 99:
                        agent.say()
                        assert daemon.http("GET", "/v1/runs").status_code == 200
                        answered += 2
        gone = refused(daemon, "evicted")
    with capsys.disabled():
        print(f"\n{ROUNDS * SILENT} silent connections, {gone:.0f} of them evicted: {answered} of {answered} answered")
    assert gone
