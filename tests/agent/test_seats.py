"""Who holds a rank of a run: processes that die, attachments that are dropped, twins elsewhere. Training goes on."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import psutil
import pytest
import torch

import tidegate
from tests import forked
from tests.agent.unclosed import train
from tests.daemon.live import hello
from tests.services import (
    ROOT,
    DaemonProcess,
    assert_nothing_grows,
    daemon_process,
    free_port,
    resources,
    until,
)
from tidegate.agent.process import has_ended, is_seen, this_process
from tidegate.client import DaemonClient
from tidegate.errors import ConfigError, NotAuthorized, RankTaken
from tidegate.wire.run import RankView

RUN = "seats"
SMALL = tidegate.Offload(device="emulated", subgroup_numel=64, cpu_threads=1)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with daemon_process(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run of the test's own."""
    return f"{RUN}-{abs(hash(request.node.nodeid)) % 10**8}"


class Tiny:
    """A model of 72 parameters and its optimizer."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.model = model or torch.nn.Linear(8, 8)
        self.optimizer = tidegate.AdamW(self.model.parameters(), lr=1e-3, offload=SMALL)

    def attach(self, daemon: DaemonProcess, run: str, **settings: object) -> tidegate.Attachment:
        return tidegate.attach(
            self.optimizer, self.model, run=run, daemon=daemon.url, token=daemon.token("agent"), **settings
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 8)).square().mean().backward()
            self.optimizer.step()


def held_by(daemon: DaemonProcess, run: str) -> RankView:
    with daemon.client("read") as client:
        return client.run(run).ranks[0]


def holder(daemon: DaemonProcess, run: str, *around: str) -> subprocess.Popen[str]:
    """A process that registers rank 0 and does nothing more; `around` is a command that starts it."""
    words = ["-m", "tests.agent.seat_holder", daemon.url, daemon.token("agent"), run]
    start = subprocess.Popen if around else forked.Popen
    process = start([*around, sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "registered\n"
    return process


# ---- a dead process, a living one


def test_a_rank_whose_process_was_killed_is_taken_over_at_once(daemon: DaemonProcess, run: str) -> None:
    dead = holder(daemon, run)
    dead.kill()
    dead.wait()
    tiny = Tiny()
    with tiny.optimizer, daemon.client("read") as client:
        tiny.attach(daemon, run, strict=True)
        assert held_by(daemon, run).pid == os.getpid()
        (row,) = (row for row in client.audit(run) if row.action == "taken over")
        assert f"Process {dead.pid} on" in row.reason


def test_a_process_that_lives_keeps_its_rank_and_training_goes_on(
    daemon: DaemonProcess, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    twin, tiny = holder(daemon, run), Tiny()
    try:
        with tiny.optimizer:
            with pytest.raises(RankTaken, match="is held by process"):
                tiny.attach(daemon, run, strict=True)
            attachment = tiny.attach(daemon, run)
            (said,) = [record for record in caplog.records if getattr(record, "event", "") == "rank_taken"]
            assert "alive" in said.message
            tiny.step(3)
            assert attachment.recorder.steps == 3
            assert held_by(daemon, run).pid == twin.pid
            twin.kill()
            twin.wait()
            until(lambda: held_by(daemon, run).pid == os.getpid(), "the rank of one that ended later")
            until(lambda: held_by(daemon, run).step == 3, "the steps from before")
    finally:
        twin.kill()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="PID namespaces need root, unshare")
@pytest.mark.slow
def test_a_twin_in_another_container_does_not_look_dead(
    daemon: DaemonProcess, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pid is another process's here, or nobody's."""
    twin, tiny = holder(daemon, run, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child"), Tiny()
    try:
        with tiny.optimizer:
            tiny.attach(daemon, run)
            assert [r.event for r in caplog.records if hasattr(r, "event") and "rank" in r.event] == ["rank_awaited"]
            tiny.step(3)
            assert held_by(daemon, run).pid < 100 != os.getpid()
            twin.kill()
            twin.wait()
            until(lambda: held_by(daemon, run).pid == os.getpid(), "the rank, when its lease has ended")
    finally:
        twin.kill()
        twin.communicate()


def test_what_is_known_of_processes() -> None:
    here = this_process()
    assert here is not None
    assert is_seen(here)
    assert not has_ended(here)
    assert has_ended(here.model_copy(update={"started": here.started + 1})), "the pid is another process's"
    for other in ({"boot": "other"}, {"namespace": "pid:[1]"}):
        assert not is_seen(here.model_copy(update=other))
        assert not has_ended(here.model_copy(update={**other, "pid": 2**22 + 1}))
    child = subprocess.Popen(["true"])
    found = here.model_copy(update={"pid": child.pid, "started": here.started})
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(found), "nobody has waited for it yet"
    child.wait()
    assert has_ended(found)
    assert not has_ended(None)


def test_a_silent_agent_of_an_older_version_is_waited_for(daemon: DaemonProcess, run: str) -> None:
    tiny = Tiny()
    with tiny.optimizer, DaemonClient(daemon.url, daemon.token("agent")) as client:
        client.hello(hello(run, world_size=1))  # it does not say which process it is
        with pytest.raises(RankTaken) as error:
            client.hello(hello(run, world_size=1))
        assert error.value.holder is not None
        assert (error.value.holder.pid, error.value.lease_seconds) == (4711, 10.0)
        tiny.attach(daemon, run)
        tiny.step()
        assert held_by(daemon, run).pid == 4711


# ---- the same process


def test_a_cell_that_runs_again_replaces_what_it_made_before(daemon: DaemonProcess, run: str) -> None:
    port = free_port()
    first, second = Tiny(), Tiny()
    with first.optimizer, second.optimizer:
        old = first.attach(daemon, run, metrics_port=port)
        first.step()
        new = second.attach(daemon, run, metrics_port=port)
        assert first.optimizer.attachment is None
        assert new.metrics_address == old.metrics_address
        second.step(2)
        first.step()
        until(lambda: held_by(daemon, run).step == 2, "the steps of the newer one")
        again = second.attach(daemon, run, metrics_port=port)
        assert second.optimizer.attachment is again is not new


def test_nothing_that_others_do_raises_unless_it_is_asked_for(
    daemon: DaemonProcess, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Tiny(), Tiny()
    with first.optimizer, second.optimizer:
        port = int(first.attach(daemon, run).metrics_address.rpartition(":")[2])
        with pytest.raises(NotAuthorized):
            tidegate.attach(second.optimizer, run="other", daemon=daemon.url, token="wrong", strict=True)
        with pytest.raises(ConfigError, match=f"{port}.*another metrics_port"):
            tidegate.attach(second.optimizer, run="other", metrics_port=port, strict=True)
        with pytest.raises(ConfigError, match="attached already"):
            first.attach(daemon, run, strict=True)
        caplog.clear()
        with tidegate.attach(
            second.optimizer, run="other", daemon=daemon.url, token="wrong", metrics_port=port
        ) as attachment:
            second.step()
            assert attachment.metrics_address.rpartition(":")[2] not in ("", str(port))
        warned = {record.event for record in caplog.records if record.levelno == logging.WARNING}  # type: ignore[attr-defined]
        assert warned == {"token_refused", "port_taken"}


# ---- ends without close()


def test_a_forked_child_that_closes_nothing_says_goodbye_with_its_steps(daemon: DaemonProcess, run: str) -> None:
    child = multiprocessing.get_context("fork").Process(target=train, args=(run, daemon.url, daemon.token("agent")))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    with daemon.client("read") as client:
        assert client.run(run).liveness == "finished"
        assert [row.step for row in client.steps(run, 0).steps] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "raise", "interrupt", "exit", "spawned"])
def test_an_unclosed_run_is_finished_and_all_its_steps_are_told(daemon: DaemonProcess, run: str, end: str) -> None:
    command = [sys.executable, "-m", "tests.agent.unclosed", daemon.url, daemon.token("agent"), run, end]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == {"return": 0, "raise": 1, "interrupt": -2, "exit": 3, "spawned": 0}[end], done.stderr
    with daemon.client("read") as client:
        view = client.run(run)
        assert view.liveness == "finished"
        assert [row.step for row in client.steps(run, 0).steps] == [1, 2, 3, 4, 5]


# ---- attachments that are dropped


def test_ten_rounds_of_a_notebook_leave_nothing_behind(daemon: DaemonProcess, run: str) -> None:
    """`opt = AdamW(…)`, attach and train, again and again, with the loss of the round before still there."""
    kept: list[object] = []

    def round_(number: int) -> weakref.ref[object]:
        tiny = Tiny()
        tiny.attach(daemon, f"{run}-{number}")
        tiny.optimizer.zero_grad()
        loss = tiny.model(torch.ones(2, 8)).square().mean()
        loss.backward()
        tiny.optimizer.step()
        kept[:] = [loss]
        return weakref.ref(tiny.optimizer)

    of_earlier_tests = set(threading.enumerate())
    gone = [round_(-1)]
    gc.collect()
    until(lambda: set(threading.enumerate()) <= of_earlier_tests, "threads that end")
    before = resources()
    gone += [round_(number) for number in range(10)]
    gc.collect()
    assert [alive() for alive in gone] == [None] * 11
    until(lambda: all(now <= was for now, was in zip(resources(), before, strict=True)), f"no more than {before}")
    with daemon.client("read") as client:
        for number in range(10):
            assert client.run(f"{run}-{number}").liveness == "finished"
            assert [row.step for row in client.steps(f"{run}-{number}", 0).steps] == [1], "its last step"


@pytest.mark.slow
def test_the_same_model_in_the_same_run_again_and_again_leaves_nothing_behind(daemon: DaemonProcess, run: str) -> None:
    """A cell that builds the optimizer, attaches and trains: each takes parameters and rank from the one before."""
    model = torch.nn.Linear(8, 8)
    last: list[tidegate.AdamW] = []

    def cell(number: int) -> None:
        tiny = Tiny(model)
        attachment = tiny.attach(daemon, run)
        tiny.step(3)
        assert attachment.recorder.steps == 3, f"round {number}"
        last[:] = [tiny.optimizer]

    assert_nothing_grows(cell, 10)
    with daemon.client("read") as client:
        assert [rank.pid for rank in client.run(run).ranks] == [os.getpid()]
        last.pop().close()
        until(lambda: client.run(run).liveness == "finished", "the end of the run")


def test_a_dropped_attachment_without_a_daemon_stops_listening() -> None:
    tiny = Tiny()
    address = tidegate.attach(tiny.optimizer, run="alone").metrics_address
    del tiny
    gc.collect()
    port = int(address.rpartition(":")[2])
    until(lambda: port not in {c.laddr.port for c in psutil.Process().net_connections()}, "the end of /metrics")
