"""Whatever a daemon answers, training goes on, and attach and close end in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tidegate
from tests.hostile import Answer, Hostile, hostile, lease, plain, trickling
from tests.services import until
from tidegate.agent.control import link_timing
from tidegate.agent.control.attachment import Attachment
from tidegate.agent.control.knob_listener import KnobListener
from tidegate.errors import RankTaken

LATE = 20.0
"""Seconds after which a call has not ended in time."""
NEW = "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_timing, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(link_timing, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(link_timing, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(link_timing, "MAX_BACKOFF_SECONDS", 0.1)


class Tiny:
    """A training of one parameter, attached to a daemon that does harm."""

    def __init__(self) -> None:
        self.param = torch.nn.Parameter(torch.ones(64))
        self.optimizer = tidegate.AdamW([self.param], offload=tidegate.Offload(device="emulated", cpu_threads=1))

    def attach(self, daemon: Hostile, **settings: Any) -> Attachment:
        return tidegate.attach(self.optimizer, run="tiny", daemon=daemon.url, token="token", **settings)

    def step(self) -> None:
        self.param.grad = torch.ones(64)
        self.optimizer.step()

    def steps_until(self, true: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            self.step()
            return true()

        until(look, what)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", NEW.encode()], ids=["nothing", "headers", "body"])
def test_a_daemon_that_trickles_holds_up_neither_attach_nor_close(start: bytes) -> None:
    tiny = Tiny()
    with hostile(lambda *_: trickling(start)) as daemon, tiny.optimizer:
        began = time.monotonic()
        attachment = tiny.attach(daemon)
        tiny.step()
        until(lambda: len(daemon.asked) > 2, "it asks again: the exchange before has ended")
        attachment.close()
        assert time.monotonic() - began < LATE


UNUSABLE: dict[str, dict[str, Any]] = {
    "out of bounds": {"stride": -5},
    "unknown": {"depth": 3},
    "too large": {"host_cache": 2**62},
    "of another type": {"order": 7},
    "text": {"tier_split": "nvme:a:b"},
}


@pytest.mark.parametrize("knobs", UNUSABLE.values(), ids=list(UNUSABLE))
def test_what_cannot_be_used_is_said_once_and_what_follows_is_taken(
    knobs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    directives = iter([{"committed": 1, "committed_knobs": knobs}] * 3)
    good = {"committed": 2, "committed_knobs": {"stride": 3}}

    def answer(first: str, _: int) -> Answer:
        if "/directive" not in first:
            return plain(lease())
        return plain({"committed": 0, "committed_knobs": {}, **next(directives, good)})

    tiny = Tiny()
    with hostile(answer) as daemon, tiny.optimizer:
        attachment = tiny.attach(daemon)
        tiny.steps_until(lambda: attachment.generation == 2, "the generation that can be used")
        assert tiny.optimizer.knobs.stride == 3
    said = [record for record in caplog.records if getattr(record, "event", "") == "generation_refused"]
    assert len(said) == 1
    assert "generation 1 cannot be used on this rank, the last good knobs stay in force" in said[0].getMessage()


def test_what_is_committed_and_cannot_be_used_is_logged_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The daemon forgets the agent at each report: it says hello again and again, and hears the same again."""
    bad = {"committed": 7, "committed_knobs": {"stride": -5}}

    def answer(first: str, _: int) -> Answer:
        if "/reports" in first and any("/votes" in asked for asked in daemon.asked):
            return plain({"type": "not-found", "detail": "no such agent"}, 404)
        return plain({"lease_seconds": 10.0, "directive": bad} if first.startswith("POST /v1/agents ") else
                     lease() if "/reports" in first else bad)  # fmt: skip

    tiny = Tiny()
    with hostile(answer) as daemon, tiny.optimizer:
        attachment = tiny.attach(daemon)
        tiny.steps_until(lambda: sum(a.startswith("POST /v1/agents ") for a in daemon.asked) > 3, "more hellos")
        assert attachment.generation == 0
    assert sum("/votes" in asked for asked in daemon.asked) == 1
    said = [record for record in caplog.records if getattr(record, "event", "") == "generation_refused"]
    assert len(said) == 1


def test_after_what_cannot_even_be_read_the_listener_goes_on() -> None:
    good = plain({"committed": 2, "committed_knobs": {"stride": 3}})
    bad = [
        plain({"committed": 1, "committed_knobs": {"host_cache": 10**400}}),
        plain({"committed": 1, "committed_knobs": {"stride": "x" * 10_000}}),
        plain('{"committed": 1, "committed_knobs": {"stride": "\\ud800"}}'),
        plain("[" * 100_000),
    ]
    directives = iter(bad)
    tiny = Tiny()
    with (
        hostile(lambda first, _: next(directives, good) if "/directive" in first else plain(lease())) as daemon,
        tiny.optimizer,
    ):
        attachment = tiny.attach(daemon)
        tiny.steps_until(lambda: attachment.generation == 2, "the generation that can be used")
        assert attachment.link is not None
        assert attachment.link.restarts == 0


@pytest.mark.parametrize("knobs", UNUSABLE.values(), ids=list(UNUSABLE))
def test_what_is_proposed_and_cannot_be_used_is_voted_down(knobs: dict[str, Any]) -> None:
    votes: list[str] = []

    def answer(first: str, _: int) -> Answer:
        if "/directive" in first and not votes:
            return plain({"committed": 0, "committed_knobs": {}, "proposed": 1, "proposed_knobs": knobs})
        votes.extend([first] if "/votes" in first else [])
        return plain(lease() if first.startswith("POST /v1/agents ") or "/reports" in first else lease()["directive"])

    tiny = Tiny()
    with hostile(answer) as daemon, tiny.optimizer:
        attachment = tiny.attach(daemon)
        until(lambda: votes, "the vote")
        tiny.step()
        assert attachment.link is not None
        assert attachment.link.restarts == 0


BAD_HELLOS: dict[str, Answer] = {
    "knob": plain({"type": "invalid-knob", "knob": "stride", "detail": "no"}, 422),
    "deep": plain("[" * 100_000, 500),
    "many digits": plain('{"detail": ' + "1" * 100_000 + "}", 500),
    "endless lease": plain({**lease(), "lease_seconds": 1e308}),
    "lease that is no number": plain('{"lease_seconds": NaN, "directive": {"committed": 0, "committed_knobs": {}}}'),
    "held for ever": plain({"type": "rank-taken", "detail": "", "holder": {}, "lease_seconds": 1e308}, 409),
    "not even text": plain(b"\xff\xfe\x00"),
    "elsewhere": plain("", 307, "Location: http://127.0.0.1:1/\r\n"),
    "unusable": plain(lease(committed=5, committed_knobs={"stride": -1})),
}


@pytest.mark.parametrize("answer", BAD_HELLOS.values(), ids=list(BAD_HELLOS))
def test_no_answer_to_a_hello_stops_training(answer: Answer) -> None:
    tiny = Tiny()
    with hostile(lambda *_: answer) as daemon, tiny.optimizer:
        attachment = tiny.attach(daemon)
        tiny.steps_until(lambda: len(daemon.asked) > 3, "more requests")
        assert attachment.link is not None
        assert attachment.link.restarts == 0
        assert all(thread.is_alive() for thread in attachment.link._threads)


@pytest.mark.slow
def test_a_strict_attach_does_not_wait_for_a_lease_without_an_end() -> None:
    endless = plain({"type": "rank-taken", "detail": "held", "holder": {"agent": "a", "host": "h", "pid": 1},
                     "lease_seconds": float("1e308")}, 409)  # fmt: skip
    tiny = Tiny()
    with hostile(lambda *_: endless) as daemon, tiny.optimizer, pytest.raises(RankTaken):
        tiny.attach(daemon, strict=True)


def test_polls_that_are_answered_at_once_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_timing, "POLLS_AT_ONCE", 4)
    number = iter(range(1, 1_000_000))

    def answer(first: str, _: int) -> Answer:
        if "/directive" in first or "/votes" in first:
            return plain({"committed": 0, "committed_knobs": {}, "proposed": next(number), "proposed_knobs": {}})
        return plain(lease())

    tiny = Tiny()
    with hostile(answer) as daemon, tiny.optimizer:
        tiny.attach(daemon)
        until(lambda: sum("agents/" in asked and "reports" not in asked for asked in daemon.asked) > 4, "polls")
        began, polls = time.monotonic(), next(number)
        until(lambda: time.monotonic() - began > 1.0, "a second")
        assert next(number) - polls < 4 + 2 * link_timing.POLLS_PER_SECOND * (time.monotonic() - began)


def test_a_thread_that_fails_begins_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    works, failures = KnobListener._listen_once, iter([ZeroDivisionError("first"), MemoryError("second")])

    def listen_once(self: KnobListener, agent: str) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        works(self, agent)

    monkeypatch.setattr(KnobListener, "_listen_once", listen_once)
    good = {"committed": 1, "committed_knobs": {"stride": 3}}
    tiny = Tiny()
    with hostile(lambda first, _: plain(good if "/directive" in first else lease())) as daemon, tiny.optimizer:
        attachment = tiny.attach(daemon)
        tiny.steps_until(lambda: attachment.generation == 1, "what the listener hears")
        assert attachment.link is not None
        assert attachment.link.restarts == 2
        assert attachment._metrics.thread_failures == 2
    said = [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "link_failed"]
    assert said == ["thread 'listen' of the link to the daemon failed and is restarted; training goes on"] * 2
