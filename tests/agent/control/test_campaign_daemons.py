"""Every kind of malicious daemon that is known, one after the other: training goes on, and attach and close end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil
import pytest
import torch

import tidegate
from tests.agent.control.hostile_kinds import AFTER_A_HELLO, after_a_hello, always
from tests.hostile import Answer, hostile
from tidegate.agent.control import link_timing

pytestmark = pytest.mark.torture
STEPS = 5
ATTACH_SECONDS = 5.0
"""The first hello has 0.3 s here; the rest is a slow machine's."""
STEP_SECONDS = 5.0
CLOSE_SECONDS = link_timing.LONGEST_GOODBYE_SECONDS + 2.0
MEMORY_BYTES = 300 << 20
"""By all kinds together; the daemons are threads of the same process, with what they send."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_timing, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(link_timing, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(link_timing, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(link_timing, "MAX_BACKOFF_SECONDS", 0.1)


def suffered(answer: Callable[[str, int], Answer]) -> list[str]:
    """What went wrong with a training that had such a daemon."""
    wrong: list[str] = []

    def timed(what: str, seconds: float, act: Callable[[], object]) -> object:
        began = time.monotonic()
        done = act()
        if (took := time.monotonic() - began) > seconds:
            wrong.append(f"{what} took {took:.1f} s, {seconds:g} s at most")
        return done

    param = torch.nn.Parameter(torch.ones(64))
    optimizer = tidegate.AdamW([param], offload=tidegate.Offload(device="emulated", cpu_threads=1))

    def train() -> None:
        for _ in range(STEPS):
            param.grad = torch.ones(64)
            optimizer.step()

    with hostile(answer) as daemon, optimizer:
        url = daemon.url
        attachment = timed("attach", ATTACH_SECONDS, lambda: tidegate.attach(optimizer, run="r", daemon=url, token="t"))
        assert isinstance(attachment, tidegate.Attachment)
        timed("training", STEP_SECONDS, train)
        deadline = time.monotonic() + 3.0
        while len(daemon.asked) < 4 and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        timed("training", STEP_SECONDS, train)
        if attachment.recorder.steps != 2 * STEPS:
            wrong.append(f"{attachment.recorder.steps} steps of {2 * STEPS}")
        if attachment.link is None or attachment.link.restarts:
            wrong.append("a thread of the link failed")
        timed("close", CLOSE_SECONDS, attachment.close)
    return wrong


@pytest.mark.timeout(1800)
def test_all_kinds_of_malicious_daemons(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(AFTER_A_HELLO) >= 43
    suffered(always(AFTER_A_HELLO["null"]))
    process, found = psutil.Process(), dict[str, list[str]]()
    before = process.memory_info().rss
    for name, harm in AFTER_A_HELLO.items():
        for when in (always, after_a_hello):
            if wrong := suffered(when(harm)):
                found[f"{name} ({when.__name__})"] = wrong
    grown = process.memory_info().rss - before
    links = [thread.name for thread in threading.enumerate() if thread.name == "tidegate-link-report"]
    with capsys.disabled():
        trainings = 2 * len(AFTER_A_HELLO)
        print(
            f"\n{len(AFTER_A_HELLO)} kinds of malicious daemons, {trainings} trainings: {len(found)} harmed, "
            f"{len(links)} hung, {2 * STEPS * trainings} steps, {grown / 2**20:.0f} MiB of memory"
        )
    assert found == {}
    assert links == []
    assert grown < MEMORY_BYTES
