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
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

import tidegate
from tests import forked
from tests.agent.control.unclosed import train
from tests.agent.devices.fake_memory import NO_BACKWARD
from tests.daemon.live import hello
from tests.hostile import Answer, hostile, lease, plain
from tests.services import (
    ROOT,
    DaemonProcess,
    assert_nothing_grows,
    daemon_process,
    free_port,
    resources,
    until,
)
from tidegate.agent.control import link_timing
from tidegate.agent.control.process_identity import has_ended, is_observable, this_host, this_process
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import ConfigError, NotAuthorized, RankTaken, TidegateError
from tidegate.wire.agent import Holder
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


def served(attachment: tidegate.Attachment) -> str:
    """What the rank's /metrics says."""
    return httpx.get(f"http://{attachment.metrics_address}/metrics", trust_env=False).text


def held_by(daemon: DaemonProcess, run: str) -> RankView:
    with daemon.client("read") as client:
        return client.run(run).ranks[0]


def holder(daemon: DaemonProcess, run: str, *around: str) -> subprocess.Popen[str]:
    """A process that registers rank 0 and does nothing more; `around` is a command that starts it."""
    words = ["-m", "tests.agent.control.rank_holder", daemon.url, daemon.token("agent"), run]
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
            knobs = tiny.optimizer.knobs
            tiny.step(3)
            assert tiny.optimizer.knobs == knobs
            assert "tidegate_steps_total" in served(attachment)
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

    def agent(host: str = this_host(), **other: object) -> Holder:
        return Holder(agent="a", host=host, pid=1, process=here.model_copy(update=other))

    assert is_observable(agent())
    assert not has_ended(agent())
    assert has_ended(agent(started=here.started + 1)), "the pid is another process's"
    elsewhere: dict[str, dict[str, object]] = {
        "another start": {"boot": "other"}, "another container": {"namespace": "pid:[1]"},
        "a clone of this machine": {"host": "clone"},
    }  # fmt: skip
    for other in elsewhere.values():
        assert not is_observable(agent(**other))
        assert not has_ended(agent(**{**other, "pid": 2**22 + 1}))
    child = subprocess.Popen(["true"])
    found = agent(pid=child.pid)
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


def test_the_rank_of_one_that_ended_elsewhere_is_taken_when_its_lease_ends() -> None:
    gone = {"type": "rank-taken", "detail": "held", "lease_seconds": 0.5,
            "holder": {"agent": "a", "host": "elsewhere", "pid": 1}}  # fmt: skip
    began: list[float] = []

    def answer(first: str, _: int) -> Answer:
        began.append(time.monotonic())
        if first.startswith("POST /v1/agents ") and time.monotonic() - began[0] < 0.5:
            return plain(gone, 409)
        return plain(lease()["directive"] if "/directive" in first else lease())

    tiny = Tiny()
    with hostile(answer) as daemon, tiny.optimizer:
        attachment = tidegate.attach(tiny.optimizer, run="later", daemon=daemon.url, token="t")
        assert attachment.link is not None
        assert not attachment.link.connected
        tiny.step()
        until(lambda: attachment.link.connected, "the rank, when the lease has ended")
        assert [first for first in daemon.asked if "/reports" in first or "/directive" in first]


@pytest.mark.parametrize("lease_seconds", [0.3, 86_400.0])
def test_a_strict_attach_waits_for_a_lease_but_not_for_any(
    lease_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_timing, "LONGEST_STRICT_SECONDS", 0.6)
    held = {"type": "rank-taken", "detail": "held", "lease_seconds": lease_seconds,
            "holder": {"agent": "a", "host": "elsewhere", "pid": 1}}  # fmt: skip
    tiny, began = Tiny(), time.monotonic()
    with hostile(lambda *_: plain(held, 409)) as daemon, tiny.optimizer:
        with pytest.raises(RankTaken):
            tidegate.attach(tiny.optimizer, run="held", daemon=daemon.url, token="t", strict=True)
        assert 0.5 < time.monotonic() - began < 5.0
        assert len(daemon.asked) > 1


# ---- what the environment holds, what the arguments are

AWAY = "http://192.0.2.1:9"
"""An address that is nobody's."""
NOT_USABLE: dict[str, tuple[dict[str, str], str, str]] = {
    "token": ({"TIDEGATE_AGENT_TOKEN": "tök"}, AWAY, "characters that no token has"),
    "token file": ({"TIDEGATE_TOKEN_DIR": "{tmp}"}, AWAY, "agent.token is not a token file"),
    "home of nobody": ({"TIDEGATE_TOKEN_DIR": "~no-such-user/tokens"}, AWAY, "home directory of an unknown user"),
    "certificates": ({"TIDEGATE_CA_FILE": "/nowhere.pem"}, "https://192.0.2.1:9", "/nowhere.pem cannot be used"),
    "no certificates": ({"TIDEGATE_CA_FILE": __file__}, "https://192.0.2.1:9", "cannot be used"),
    "system's certificates": ({"SSL_CERT_FILE": "/nowhere.pem"}, "https://192.0.2.1:9", "cannot be read"),
    "proxy": ({"HTTP_PROXY": "http://:@@"}, AWAY, "HTTP_PROXY names no proxy"),
    "proxy's port": ({"HTTP_PROXY": "http://x:word"}, AWAY, "HTTP_PROXY names no proxy"),
    "proxy's kind": ({"ALL_PROXY": "ftp://x"}, AWAY, "ALL_PROXY names no proxy"),
    "log format": ({"TIDEGATE_LOG_FORMAT": "yaml"}, "", "not a log format"),
}


@pytest.mark.parametrize(("variables", "daemon", "said"), NOT_USABLE.values(), ids=list(NOT_USABLE))
def test_nothing_in_the_environment_stops_a_training(
    variables: dict[str, str], daemon: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for name in ("TIDEGATE_TOKEN", "TIDEGATE_AGENT_TOKEN", "NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "agent.token").write_bytes(b"\xff\xfe token")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("{tmp}", str(tmp_path)))
    tiny = Tiny()
    with tiny.optimizer:
        with pytest.raises(TidegateError, match=said):
            tidegate.attach(tiny.optimizer, tiny.model, run="any", daemon=daemon or None, strict=True)
        caplog.clear()
        attachment = tidegate.attach(tiny.optimizer, tiny.model, run="any", daemon=daemon or None)
        (warned,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert said in warned
        assert attachment.link is None
        knobs = tiny.optimizer.knobs
        tiny.step()
        assert tiny.optimizer.knobs == knobs
        assert attachment.recorder.steps == 1
        assert "tidegate_steps_total" in served(attachment)


ARGUMENTS: dict[str, tuple[dict[str, object], str]] = {
    "no name": ({"run": ""}, "run='' is not a valid name of a run"),
    "name of a path": ({"run": "bad name/.."}, "run='bad name/..' is not a valid name of a run"),
    "long name": ({"run": "a" * 65}, "is not a valid name of a run"),
    "number": ({"run": 7}, "run=7 is not a valid name of a run"),
    "daemon": ({"run": "any", "daemon": "head:8790"}, "daemon='head:8790'.*give http://host:port"),
    "daemon's port": ({"run": "any", "daemon": "http://head:x"}, "give http://host:port"),
    "port": ({"run": "any", "metrics_port": 70_000}, "metrics_port=70000 is not a port"),
    "negative port": ({"run": "any", "metrics_port": -1}, "metrics_port=-1 is not a port"),
    "host": ({"run": "any", "advertise_host": "h" * 300}, "advertise_host='hhh.* is not a host"),
}


@pytest.mark.parametrize("with_daemon", [False, True])
@pytest.mark.parametrize(("given", "said"), ARGUMENTS.values(), ids=list(ARGUMENTS))
def test_an_argument_that_cannot_work_is_said_with_a_daemon_and_without(
    given: dict[str, object], said: str, with_daemon: bool
) -> None:
    tiny = Tiny()
    with tiny.optimizer, pytest.raises(ConfigError, match=said):
        tidegate.attach(tiny.optimizer, **{**({"daemon": AWAY} if with_daemon else {}), **given})
    assert tiny.optimizer.attachment is None


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
            assert 'tidegate_agent_refused{reason="token"} 1.0' in served(attachment)
            assert 'tidegate_agent_refused{reason="rank"} 0.0' in served(attachment)
        with daemon.client("read") as client:
            assert {one.reason for one in client.refused_agents()} == {"wrong-token"}
        warned = {record.event for record in caplog.records if record.levelno == logging.WARNING}  # type: ignore[attr-defined]
        assert warned == {"token_refused", "port_taken"}


# ---- ends without close()


def train_where_torch_allows_it(*given: str) -> None:
    try:
        train(*given)
    except RuntimeError as error:
        if "autograd's threading" in str(error):
            sys.exit(NO_BACKWARD)
        raise


def test_a_forked_child_that_closes_nothing_says_goodbye_with_its_steps(daemon: DaemonProcess, run: str) -> None:
    given = (run, daemon.url, daemon.token("agent"))
    child = multiprocessing.get_context("fork").Process(target=train_where_torch_allows_it, args=given)
    child.start()
    child.join(60)
    if child.exitcode == NO_BACKWARD:
        pytest.skip("where torch uses a GPU, it refuses a backward in a forked process")
    assert child.exitcode == 0
    with daemon.client("read") as client:
        assert client.run(run).liveness == "finished"
        assert [row.step for row in client.steps(run, 0).steps] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "raise", "interrupt", "exit", "spawned"])
def test_an_unclosed_run_has_ended_and_all_its_steps_are_told(daemon: DaemonProcess, run: str, end: str) -> None:
    command = [sys.executable, "-m", "tests.agent.control.unclosed", daemon.url, daemon.token("agent"), run, end]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == {"return": 0, "raise": 1, "interrupt": -2, "exit": 3, "spawned": 0}[end], done.stderr
    with daemon.client("read") as client:
        view = client.run(run)
        assert view.liveness == ("failed" if end == "raise" else "finished")
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
