"""Agent and daemon together, as processes that come and go: training goes on, knobs stay intact."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import tidegate
from tests.agent.training import Training
from tests.daemon.live import hello
from tests.services import ROOT, DaemonProcess, daemon_process, free_port, until
from tidegate.agent.control import link_timing, rank_messages
from tidegate.agent.control.attachment import Attachment
from tidegate.agent.control.daemon_link import AgentLink
from tidegate.agent.control.link_timing import MAX_BACKOFF_SECONDS, backoff, pause_after_report
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import KnobError, StaleKnobs
from tidegate.timeline.step_record import FinishedStep
from tidegate.wire.agent import AgentReport

RUN = "link"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon_process(tmp_path / "state") as running:
        yield running


def attached(training: Training, daemon: DaemonProcess, **settings: object) -> tidegate.Attachment:
    return tidegate.attach(
        training.optimizer, training.model, run=RUN, daemon=daemon.url, token=daemon.token("agent"), **settings
    )


def test_knobs_that_do_not_fit_are_refused_with_figures_and_the_last_good_ones_stay(daemon: DaemonProcess) -> None:
    training = Training(device_memory_bytes=36_000_000, static_ratio=0.1)
    with training.optimizer, daemon.client() as client:
        attachment = attached(training, daemon)
        training.start()
        refused = client.set_knobs(RUN, {"static_ratio": 1.0})
        assert refused.state == "refused"
        assert "residents need" in refused.outcome
        assert "36,000,000 bytes" in refused.outcome
        view = client.knobs(RUN)
        assert view.desired == {"stride": 2, "static_ratio": 0.1}
        steps = training.steps
        until(lambda: training.steps > steps + 2, "training goes on")
        training.stop()
        assert attachment.generation == 0
        assert training.optimizer.effective_knobs() == {"stride": 2, "static_ratio": 0.1}


def test_bad_knobs_name_the_bound_and_stale_ones_are_told(daemon: DaemonProcess) -> None:
    training = Training()
    with training.optimizer, daemon.client() as client:
        attached(training, daemon)
        with pytest.raises(KnobError, match=r"stride=0.5.*a number from 1"):
            client.set_knobs(RUN, {"stride": 0.5})
        with pytest.raises(KnobError, match="no knob 'strid'"):
            client.set_knobs(RUN, {"strid": 2})
        client.set_knobs(RUN, {"stride": 3}, generation=0)
        with pytest.raises(StaleKnobs):
            client.set_knobs(RUN, {"stride": 5}, generation=0)


def test_a_killed_daemon_does_not_stop_training_and_knobs_are_intact_when_it_is_back(daemon: DaemonProcess) -> None:
    training = Training()
    with training.optimizer:
        attachment = attached(training, daemon)
        training.start()
        with daemon.client() as client:
            client.set_knobs(RUN, {"stride": 3})
            until(lambda: attachment.generation == 1, "generation 1")
            known = until(lambda: client.steps(RUN, 0).steps, "a report")[-1].step
            until(lambda: client.steps(RUN, 0).steps[-1].step > known, "a report that is not written yet")
        daemon.kill()
        steps = training.steps
        until(lambda: training.steps > steps + 5, "steps without a daemon")
        assert training.optimizer.effective_knobs()["stride"] == 3
        daemon.start()
        with daemon.client() as client:
            until(lambda: client.runs()[0].liveness == "live", "the agent back", 20)
            assert client.knobs(RUN).desired["stride"] == 3
            client.set_knobs(RUN, {"stride": 4})
            until(lambda: attachment.generation == 2, "generation 2")
            # Steps that were finished while nobody listened, or told to a daemon that died with them, came afterwards.
            reported = [row.step for row in client.steps(RUN, 0, limit=256).steps]
            assert steps + 3 in reported
            assert reported == [*range(reported[0], reported[-1] + 1)]
        training.stop()


def test_a_daemon_that_lost_its_store_begins_anew_from_what_runs(daemon: DaemonProcess) -> None:
    training = Training()
    with training.optimizer:
        attachment = attached(training, daemon)
        training.start()
        with daemon.client() as client:
            client.set_knobs(RUN, {"stride": 3})
        until(lambda: attachment.generation == 1, "generation 1")
        token = daemon.token("agent")
        daemon.kill()
        for path in (*daemon.state.glob("*.db*"), daemon.state / "database.made"):
            path.unlink()
        (daemon.state / "agent.token").write_text(token)
        daemon.start()
        with daemon.client() as client:
            until(lambda: [r for r in client.runs() if r.run == RUN], "the run again", 20)
            assert client.knobs(RUN).desired["stride"] == 3
            client.set_knobs(RUN, {"stride": 4})
            until(lambda: training.optimizer.effective_knobs()["stride"] == 4, "stride 4", 20)
        training.stop()


def test_a_daemon_that_comes_later_is_found_and_its_knobs_hold(tmp_path: Path) -> None:
    training = Training()
    later = DaemonProcess(free_port(), tmp_path / "state")
    with daemon_process(tmp_path / "state") as first:
        token = first.token("agent")
        with DaemonClient(first.url, token) as client:
            before = hello(RUN, world_size=1, knobs={"stride": 5.0, "static_ratio": 0.0})
            client.hello(before)
            client.goodbye(before.agent)
    with training.optimizer:
        tidegate.attach(training.optimizer, training.model, run=RUN, daemon=later.url, token=token)
        training.start()
        try:
            later.start()
            with later.client() as client:
                until(lambda: client.run(RUN).liveness == "live", "the run", 20)
            until(lambda: training.optimizer.effective_knobs()["stride"] == 5, "stride 5", 20)
            training.stop()
        finally:
            later.kill()


def test_after_a_clean_end_the_desired_knobs_wait_for_the_next_start(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    for reset, expected in ((False, 3), (True, 2)):
        caplog.clear()
        training = Training()
        with training.optimizer, daemon.client() as client:
            attached(training, daemon, reset_knobs=reset)
            training.step()
            if not reset:
                client.set_knobs(RUN, {"stride": 3})
        training = Training()
        with training.optimizer:
            attached(training, daemon, reset_knobs=reset)
            training.step()
            assert training.optimizer.effective_knobs()["stride"] == expected
        kept = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "knobs_kept"]
        assert ["stride=3, not 2." in text for text in kept] == ([] if reset else [True])
    with daemon.client() as client:
        assert client.runs()[0].liveness == "finished"


def refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_report_that_cannot_be_made_ends_neither_the_reports_nor_the_rest(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: FinishedStep) -> NoReturn:
        tried.append(1)
        raise ValueError("more than fits")

    training, tried = Training(), list[int]()
    with training.optimizer as optimizer, daemon.client() as client:
        attachment = attached(training, daemon)
        assert attachment.link is not None
        training.step()
        with monkeypatch.context() as patch:
            patch.setattr(rank_messages, "view_of", broken)
            for count in (1, 2):
                attachment.link._requests.put(None)
                until(lambda count=count: len(tried) > count, "a report that fails")
        attachment.link._requests.put(None)
        until(lambda: [row.step for row in client.steps(RUN, 0).steps] == [1], "the step that was not lost")
        assert caplog.text.count("a report could not be made") == 1
        monkeypatch.setattr(rank_messages, "view_of", broken)
        optimizer.close()
        assert refuses(attachment.metrics_address)
        assert client.runs()[0].liveness == "finished"


def test_what_fails_at_the_end_keeps_nothing_else_from_ending(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: AgentLink) -> NoReturn:
        close()
        raise RuntimeError("in the link")

    training = Training()
    attachment = attached(training, daemon)
    training.step()
    assert attachment.link is not None
    close = attachment.link.close
    monkeypatch.setattr(AgentLink, "close", broken)
    with pytest.raises(RuntimeError, match="in the link"):
        training.optimizer.close()
    assert refuses(attachment.metrics_address)
    assert not training.optimizer.engine.usable


def test_an_attachment_that_fails_gives_the_rank_back(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> NoReturn:
        raise RuntimeError("in the collective")

    training = Training()
    with training.optimizer:
        with monkeypatch.context() as patch:
            patch.setattr(Attachment, "_apply_committed", broken)
            with pytest.raises(RuntimeError, match="in the collective"):
                attached(training, daemon)
        attached(training, daemon)


def test_the_more_a_report_costs_the_rarer_reports_are() -> None:
    assert [pause_after_report(seconds) for seconds in (0.0, 0.0005, 0.002, 0.5)] == [1.0, 1.0, 2.0, 4.0]
    assert [pause_after_report(seconds, 0.1) for seconds in (0.0, 0.0005, 0.002, 0.5)] == [0.1, 0.1, 0.2, 4.0], (
        "a canary's"
    )
    assert pause_after_report(0.0, 60.0) == 1.0, "a trial of slow steps makes no rank silent"


def test_what_the_daemon_may_not_have_written_is_told_again_however_often_it_reports() -> None:
    told: list[object] = []
    link = object.__new__(AgentLink)  # without its threads
    link._delivered, link._identity_lock, link._requeue = deque(), threading.Lock(), told.append  # type: ignore[method-assign]
    reports = [AgentReport(timestamp=n, step=n, phase="other", generation=0, effective={}) for n in range(50)]
    for number, report in enumerate(reports):
        link._keep(report, 100.0 + 0.125 * number)
    link._requeue_recent()
    assert told == reports[:-26:-1], "three seconds, the newest first"
    link._keep(reports[0], 200.0)
    link._keep(reports[1], 204.0)
    link._requeue_recent()
    assert told[25:] == [reports[1]]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_ranks_apply_a_generation_between_the_same_two_steps(daemon: DaemonProcess, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python",
        sys.executable, "-m", "tests.agent.control.linked_ranks", daemon.url, daemon.token("agent"), str(tmp_path),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        with daemon.client() as client:
            until(lambda: [r for r in client.runs() if r.run == "ranks" and len(r.ranks) == 2], "two ranks", 90)
            for stride in (3, 1.5, "off"):
                assert client.set_knobs("ranks", {"stride": stride}, wait=20).state in ("committed", "applied")
            applied = until(
                lambda: [g for g in client.generations("ranks") if g.generation == 3 and len(g.applied) == 2],
                "generation 3 on both ranks",
                30,
            )[0]
            assert applied.applied[0] == applied.applied[1]
            # Rank 1 has no room for all residents: neither rank takes them.
            refused = client.set_knobs("ranks", {"static_ratio": 1.0}, wait=20)
            assert (refused.state, "rank 1" in refused.outcome.lower()) == ("refused", True), refused
            (tmp_path / "stop").touch()
        errors = ranks.communicate(timeout=60)[1]
        assert ranks.returncode == 0, errors.decode()[-2000:]
        histories = [(tmp_path / f"strides-{rank}").read_text() for rank in (0, 1)]
        assert histories[0] == histories[1]
        assert "off" in histories[0]
    finally:
        ranks.kill()
        ranks.wait()


def test_the_pause_before_another_attempt_doubles_up_to_a_bound() -> None:
    """Each is between half of it and all of it, so that ranks do not come back at one moment."""
    for failures in (1, 2, 3, 4, 5, 10, 1_000_000):
        longest = min(MAX_BACKOFF_SECONDS, 0.25 * 2.0 ** min(failures, 10))
        found = {backoff(failures) for _ in range(100)}
        assert longest / 2 <= min(found) < 0.7 * longest
        assert 0.8 * longest < max(found) <= longest


def test_a_thread_of_the_link_that_fails_again_and_again_waits_ever_longer(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    training = Training()
    with training.optimizer:
        link = attached(training, daemon).link
        assert link is not None
        monkeypatch.setattr(link_timing, "backoff", lambda failures: waited.append(failures) or 0.0)

        def work() -> None:
            if len(waited) < 5:
                raise RuntimeError("on purpose")

        before = link.restarts
        link._run_forever("report", work)
        assert waited == [1, 2, 3, 4, 5]
        assert link.restarts == before + 5
