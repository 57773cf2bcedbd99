"""The command line as users meet it: a process with arguments, an exit code, and sentences."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2]))

import tidegate
from tests import forked
from tests.daemon.live import (
    ROOT,
    Agent,
    Daemon,
    environment,
    hello,
    listen,
    new_run,
    step_report,
    threaded,
    wait_until,
)
from tests.services import daemon_process
from tidegate import units
from tidegate.cli import watch
from tidegate.cli.tables import print_preview
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import DaemonError, DaemonUnreachable
from tidegate.wire.agent import AgentReport, Vote
from tidegate.wire.event import Event
from tidegate.wire.evidence import ModelEvidence, SubgroupSizes
from tidegate.wire.prediction import KnobPreview, PredictedUpdate
from tidegate.wire.step import PathState
from tidegate.wire.timeline import PhaseRow, SpanRow, TimelineView


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with threaded(tmp_path / "state", proposal_seconds=60.0, lease_seconds=60.0) as running:
        yield running


def run(daemon: Daemon | None, *words: str, state: Path | None = None, **variables: str) -> tuple[int, str, str]:
    """Exit code, what it printed, and what it said on stderr."""
    if daemon is not None:
        state = daemon.state
        variables = {"TIDEGATE_DAEMON": daemon.url, **variables}
    assert state is not None
    done = forked.run(
        [sys.executable, "-m", "tidegate", *words], cwd=ROOT, env=environment(state, **variables), timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr.strip()


def without(packages: tuple[str, ...], *words: str, state: Path) -> tuple[int, str]:
    """The command where `packages` are not installed."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages!r})); sys.argv[1:] = {list(words)!r}; "
        "from tidegate.cli.main import main; main()"
    )
    # A daemon may run at the default address of the machine that tests: nothing listens on port 9.
    env = environment(state, TIDEGATE_DAEMON="http://127.0.0.1:9")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


PARTS = ("torch", "numpy", "fastapi", "uvicorn", "sqlalchemy", "prometheus_client", "streamlit", "plotly", "pandas")


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    assert run(None, "--version", state=tmp_path) == (0, f"tidegate {tidegate.__version__}\n", "")


def test_help_and_status_need_no_part(tmp_path: Path) -> None:
    code, text = without(PARTS, "--help", state=tmp_path)
    assert code == 0
    for command in (
        "daemon",
        "status",
        "knobs",
        "history",
        "rollback",
        "advice",
        "events",
        "trace",
        "dashboard",
        "demo",
        "train",
        "doctor",
    ):
        assert command in text
    code, text = without(PARTS, "status", state=tmp_path)
    assert (code, "No daemon answers" in text) == (1, True)
    code, text = without(PARTS, "doctor", state=tmp_path)
    assert (code, "pip install 'tidegate[agent]'" in text) == (0, True)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("daemon",), "daemon"),
        (("token", "create", "read"), "daemon"),
        (("dashboard",), "dashboard"),
        (("demo",), "demo"),
    ],
)
def test_a_missing_extra_is_named(tmp_path: Path, words: tuple[str, ...], extra: str) -> None:
    code, text = without(PARTS, *words, state=tmp_path)
    assert (code, f"pip install 'tidegate[{extra}]'" in text, "Traceback" in text) == (1, True, False), text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ("knobs", "set", "pace=3"),
            2,
            "There is no knob 'pace'. The knobs are: stride, static_ratio, tier_split, host_cache, order.",
        ),
        (("knobs", "set", "stride=0.5"), 2, "stride='0.5' is out of range: a number from 1"),
        (("knobs", "set", "some-run"), 2, "No knob is given: give at least one, as in stride=3."),
        (("knobs", "set", "host_cache=lots"), 2, "host_cache='lots' is out of range: bytes from 0 to 1024TiB"),
        (("knobs", "set", "stride=3", "fast"), 2, "'fast' is not KNOB=VALUE"),
        (("knobs", "get", "nowhere"), 1, "There is no run 'nowhere'. There is none yet."),
        (("knobs", "set", "stride=3", "--run", "nowhere"), 1, "There is no run 'nowhere'."),
        (("knobs", "get"), 1, "No run is running."),
        (("trace", "--run", "nowhere"), 1, "There is no run 'nowhere'."),
        (("status", "--daemon", "head"), 1, "'head' is not an address of a daemon: give http://host:port."),
        (("token", "create", "read", "--run", "a/b"), 2, "'a/b' cannot be the name of a run"),
        (
            ("token", "create", "read", "--expires", "soon"),
            2,
            "--expires 'soon' is not a duration: give one such as 12h or 30d",
        ),
        (
            ("token", "create", "read", "--expires", "\u0661\u0662h"),
            2,
            "--expires '\u0661\u0662h' is not a duration: give one such as 12h or 30d",
        ),
        (("token", "create", "alert", "--run", "llama"), 2, "--run cannot be combined with scope alert"),
        (("token", "revoke", "nothing"), 1, "No token, or more than one, has an id that begins with 'nothing'"),
        (("token", "create", "root"), 2, "There is no scope 'root'. The scopes are: read, operate, agent, alert."),
        (("train", "--stride", "0"), 2, "stride='0' is out of range"),
    ],
)
def test_errors_are_one_sentence(daemon: Daemon, words: tuple[str, ...], code: int, said: str) -> None:
    found, out, error = run(daemon, *words)
    assert (found, out) == (code, "")
    assert error.startswith(f"tidegate: {said}")
    assert error.count("\n") == 0


@pytest.mark.parametrize(
    "words", [("nonsense",), ("knobs", "set"), ("daemon", "--port", "99999"), ("knobs", "set", "--x")]
)
def test_wrong_usage(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert run(None, *words, state=tmp_path)[0] == 2


def test_no_daemon(tmp_path: Path) -> None:
    with listen() as taken:
        port = taken.getsockname()[1]
    code, _, error = run(None, "status", state=tmp_path, TIDEGATE_DAEMON=f"http://127.0.0.1:{port}")
    assert (code, error) == (
        1,
        f"tidegate: No daemon answers at http://127.0.0.1:{port}. Start the first one with `tidegate daemon`. Start "
        "one that ran before with the port and the state directory that it had: in another directory it is empty.",
    )


def test_wrong_token(daemon: Daemon) -> None:
    assert run(daemon, "status", TIDEGATE_TOKEN="tide_x")[::2] == (1, "tidegate: The daemon does not know this token.")
    code, _, error = run(daemon, "knobs", "get", "any", state=daemon.state, TIDEGATE_TOKEN=daemon.tokens["alert"])
    assert (code, "The token has scope alert" in error) == (1, True)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with listen() as taken:
        port = str(taken.getsockname()[1])
        code, _, error = run(None, "daemon", "--port", port, state=tmp_path)
    assert (code, f"Port {port} on 127.0.0.1 is taken" in error, error.count("\n")) == (1, True, 0)


def test_status(daemon: Daemon) -> None:
    assert "No runs yet" in run(daemon, "status")[1]
    agent = Agent(daemon, "llama-7b")
    agent.train(3, update_seconds=1.5)
    code, text, _ = run(daemon, "status")
    assert code == 0
    for word in ("llama-7b", "live", "1.50 s", "emulated", "stride=3", "no measurement"):
        assert word in text
    verdict = "The update took 1.5 s, 94% of the step; hardly anything held it up."
    assert f"llama-7b: {verdict}" in text
    (row,) = json.loads(run(daemon, "status", "--json")[1])
    assert (row["run"], row["step"], row["ranks"][0]["last_step"]["phase_seconds"]["update"]) == ("llama-7b", 3, 1.5)
    assert row["verdict"] == verdict
    assert json.loads(run(daemon, "status", "--run", "llama-7b", "--json")[1])[0] == row


def test_status_names_agents_that_are_refused(daemon: Daemon) -> None:
    said = "Agents at 127.0.0.1 are refused, because they send no token"
    assert said not in run(daemon, "status")[1]
    daemon.http("POST", "/v1/agents", None)
    assert said in run(daemon, "status")[1]
    Agent(daemon, "llama-7b").train(1, update_seconds=1.5)
    assert said in run(daemon, "status")[1]


def test_runs_that_ended_are_folded_away_and_the_newest_comes_first(daemon: Daemon) -> None:
    for number in range(5):
        agent = Agent(daemon, f"ended-{number}").begin()
        agent.train(2, update_seconds=1.5)
        agent.client.goodbye(agent.id)
    text = run(daemon, "status")[1]
    names = re.findall(r"^(ended-\d) ", text, re.MULTILINE)
    assert names == ["ended-4", "ended-3", "ended-2"], "while nothing runs"
    Agent(daemon, "older").train(1, 1.0)
    Agent(daemon, "newer").train(1, 1.0)
    text = run(daemon, "status")[1]
    assert "ended-" not in text
    assert text.index("newer") < text.index("older")
    assert "Not shown: 5 finished. See them with `tidegate status --all`." in text
    assert len(re.findall(r"^ended-\d ", run(daemon, "status", "--all")[1], re.MULTILINE)) == 5
    said = run(daemon, "knobs", "get", "nowhere")[2]
    assert "There is no run 'nowhere'. Live: newer, older. Ended: ended-4, ended-3," in said


def test_a_run_that_lost_one_of_its_ranks_is_shown_and_its_silent_rank_named(tmp_path: Path) -> None:
    with threaded(tmp_path / "state", lease_seconds=1.0) as daemon:
        first, other = Agent(daemon, "llama-7b"), Agent(daemon, "calm")
        Agent(daemon, "llama-7b", rank=1).train(1, 1.0)

        def others_go_on() -> bool:
            first.train(1, 1.0)
            other.train(1, 1.0)
            return daemon.client().run("llama-7b").liveness == "lost"

        wait_until(others_go_on, "a lost rank")
        text, view = run(daemon, "status")[1], daemon.client().run("llama-7b")
    assert (view.is_running, [rank.liveness for rank in view.ranks][1]) == (True, "lost")
    assert re.search(r"llama-7b +1/2 +lost \d+ s", text)
    assert re.search(r"llama-7b: Lost: no message from rank 1 for \d", text)
    assert "Not shown" not in text


def test_a_knob_that_is_set_twice_is_refused(daemon: Daemon) -> None:
    code, _, error = run(daemon, "knobs", "set", "stride=2", "stride=3")
    assert (code, error) == (2, "tidegate: stride is set twice (stride=2 stride=3): give one value.")


def test_knobs_set_and_get(daemon: Daemon) -> None:
    with Agent(daemon, "llama-7b").answering():
        code, text, error = run(daemon, "knobs", "set", "stride=3", "static_ratio=0.25", "--reason", "it stalls")
        assert (code, error) == (0, "")
        assert text.startswith("Generation 1 committed: stride=3 static_ratio=0.25. The rank said yes.")
        wait_until(lambda: daemon.client().generations("llama-7b")[1].state == "applied", "applied")
        assert run(daemon, "knobs", "set", "llama-7b", "stride=auto")[0] == 0, "the run may come first"
    code, text, _ = run(daemon, "knobs", "get")
    assert "Run llama-7b, newest generation 2" in text
    view = json.loads(run(daemon, "knobs", "get", "llama-7b", "--json")[1])
    assert view["desired"] == {"stride": "auto", "static_ratio": 0.25}
    code, text, _ = run(daemon, "history")
    assert code == 0
    assert "(it stalls)" in text
    assert [row["generation"] for row in json.loads(run(daemon, "history", "--json")[1])] == [0, 1, 2]


def test_times_are_in_utc_wherever_the_reader_is(daemon: Daemon) -> None:
    Agent(daemon, "llama-7b").train(1, 1.0)
    made = daemon.client().generations("llama-7b")[0].created_at
    assert units.moment(1_782_000_000.5) == "2026-06-21 00:00:00Z"
    assert units.moment(made) in run(daemon, "history", TZ="America/New_York")[1]
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ  rank 0 is live", run(daemon, "events")[1], re.MULTILINE)


def test_knobs_of_storage_paths(daemon: Daemon) -> None:
    agent = Agent(daemon, "llama-7b", paths=("nvme", "pfs"))
    words = ("tier_split=nvme:2,pfs:1", "host_cache=8GiB", "order=pinned")
    with agent.answering():
        code, text, error = run(daemon, "knobs", "set", *words)
        assert (code, error) == (0, "")
        assert text.startswith(f"Generation 1 committed: stride=2 static_ratio=0 {' '.join(words)}. The rank said yes.")
    code, text, _ = run(daemon, "knobs", "get")
    for shown in (
        "nvme:2,pfs:1",
        "nvme:WEIGHT,pfs:WEIGHT, auto",
        "8GiB",
        "0 to 1024TiB, auto",
        "auto, pinned, alternate",
    ):
        assert shown in text
    assert json.loads(run(daemon, "knobs", "get", "--json")[1])["desired"]["host_cache"] == 8 * 2**30
    code, text, _ = run(daemon, "knobs", "set", "host_cache=512MB", "tier_split=nvme:4,pfs:2", "--dry-run")
    assert (code, "512MB" in text, "tier_split" in text) == (0, True, False), "the ratio is the same"
    code, _, error = run(daemon, "knobs", "set", "tier_split=ssd:1")
    assert (code, error) == (2, "tidegate: tier_split='ssd:1' names 'ssd'; the run's paths are: nvme, pfs.")


def test_a_retired_path_is_marked(daemon: Daemon) -> None:
    agent = Agent(daemon, "llama-7b", paths=("nvme", "pfs"))
    evidence = ModelEvidence(retired=("nvme",), retired_reasons={"nvme": "Path nvme: No space left."})
    states = (PathState(path="nvme", retired=True), PathState(path="pfs"))
    step = step_report(1).model_copy(update={"path_states": states})
    agent.say(evidence=evidence, steps=(step,))
    text = run(daemon, "knobs", "get")[1]
    assert "nvme: retired on rank 0: Path nvme: No space left.\n" in text
    assert ("pfs:WEIGHT, auto" in text, "nvme:WEIGHT" in text) == (True, False)
    said = "llama-7b: Path nvme is retired on rank 0: `tidegate knobs get llama-7b` says why."
    assert said in run(daemon, "status")[1]


def test_a_cache_larger_than_the_state_is_said_to_be_so(daemon: Daemon) -> None:
    sizes = (SubgroupSizes(numel=1000, count=2, weight_bytes=2, grad_bytes=2, state_bytes=8),)
    agent = Agent(daemon, "llama-7b", paths=("nvme", "pfs"), subgroups=sizes)
    for value, said in (("999GiB", True), ("1KB", False)):
        with agent.answering():
            text = run(daemon, "knobs", "set", f"host_cache={value}")[1]
        assert ("is more than the state of rank 0, 16KB: only as much as the state needs is used." in text) is said


def test_a_run_without_paths_has_no_knobs_of_storage(daemon: Daemon) -> None:
    Agent(daemon, "llama-7b")
    for word in ("tier_split=nvme:1", "host_cache=0", "order=auto"):
        code, _, error = run(daemon, "knobs", "set", word)
        assert (code, "this run has no storage paths; start it with Offload(paths=…)" in error) == (2, True)
    text = run(daemon, "knobs", "get")[1]
    assert not any(name in text for name in ("tier_split", "host_cache", "order"))


def test_dry_run(daemon: Daemon) -> None:
    Agent(daemon, "llama-7b")
    code, text, _ = run(daemon, "knobs", "set", "stride=3", "--dry-run")
    assert (code, "No prediction yet" in text) == (0, True)
    assert json.loads(run(daemon, "knobs", "set", "stride=3", "--dry-run", "--json")[1])["changed"] == {"stride": 3.0}
    assert daemon.client().knobs("llama-7b").generation == 0


def test_a_preview_shows_memory_in_one_kind_of_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """14,428,569 bytes are 13.76 MiB, and 9,907,840 bytes are 9907.84 KB: beside each other, both are in MB."""

    def predicted(nbytes: int) -> PredictedUpdate:
        return PredictedUpdate(
            update_seconds=1.0, stalls={}, lane_bytes={}, host_memory_bytes={"state": nbytes},
            device_memory_bytes=nbytes, bound_seconds=1.0, bound_by="h2d",
        )  # fmt: skip

    print_preview(
        KnobPreview(
            run="llama-7b",
            generation=1,
            before={"stride": 2},
            after={"stride": 3},
            changed={"stride": 3},
            predicted_before=predicted(14_428_569),
            predicted_after=predicted(9_907_840),
        )
    )
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "memory" in line]
    assert [row[-4:] for row in rows] == [["14.4", "MB", "9.91", "MB"]] * 2


def test_a_refusal_is_a_failure(daemon: Daemon) -> None:
    agent = Agent(daemon, "llama-7b")
    agent.refuse = "needs 9.0 GB, 4.0 GB are free"
    with agent.answering():
        code, text, _ = run(daemon, "knobs", "set", "static_ratio=1")
    assert (code, "Rank 0 refused: needs 9.0 GB" in text) == (1, True)


def test_silence_is_a_failure(tmp_path: Path) -> None:
    with threaded(tmp_path / "state", proposal_seconds=1.0) as daemon:
        Agent(daemon, "llama-7b")
        code, text, _ = run(daemon, "knobs", "set", "stride=9")
    assert (code, "No answer from rank 0" in text) == (1, True)


def test_what_is_not_decided_yet_is_no_success(daemon: Daemon) -> None:
    """A script goes on as if the knobs were set otherwise: the rank has not answered when the wait is over."""
    Agent(daemon, "llama-7b")
    code, text, _ = run(daemon, "knobs", "set", "stride=9", "--wait", "0")
    assert (code, "Generation 1" in text) == (1, True), text
    assert daemon.client().generations("llama-7b")[1].state in ("pending", "proposed")


def test_stale_says_who(daemon: Daemon) -> None:
    agent = Agent(daemon, "llama-7b")
    agent.client.goodbye(agent.id)
    daemon.client().set_knobs("llama-7b", {"stride": 4})
    code, _, error = run(daemon, "knobs", "set", "stride=5", "--run", "llama-7b", "--generation", "0")
    assert code == 1
    assert "at generation 1" in error
    assert "(operate) changed stride=4 at" in error


def test_canary_history_and_rollback(daemon: Daemon) -> None:
    agent = Agent(daemon, "llama-7b").begin()
    agent.train(12, 1.0)
    with agent.answering():
        code, text, _ = run(daemon, "knobs", "set", "stride=5", "--canary", "10", "--min-effect", "0.1")
        assert (code, "Canary: 10 steps decide" in text) == (0, True)
        wait_until(lambda: daemon.client().generations("llama-7b")[1].state == "applied", "applied")
        assert "[canary waiting: too few steps yet]" in run(daemon, "history")[1]
        agent.train(11, 4.0)
        wait_until(lambda: len(daemon.client().generations("llama-7b")) == 3, "the way back")
        wait_until(lambda: daemon.client().generations("llama-7b")[2].state == "applied", "the way back")
        rows = json.loads(run(daemon, "history", "--json")[1])
        assert (rows[1]["canary"]["state"], rows[2]["restores"]) == ("rolled_back", 0)
        code, text, _ = run(daemon, "rollback", "1", "--reason", "it was fine")
        assert (code, text.startswith("Generation 3 committed: stride=5")) == (0, True), text
        wait_until(lambda: daemon.client().generations("llama-7b")[3].state == "applied", "applied")
    text = run(daemon, "events")[1]
    assert "rank 0 is live" in text
    assert "canary condemned: Harmful: a step (forward, backward and update) took" in text
    assert "generation 3 applied: stride=5" in text
    assert len(text.splitlines()) == len(set(text.splitlines())), "an effect that is measured anew is no news"
    assert run(daemon, "advice")[:2] == (0, "No prediction yet: it needs the rates of a few steps.\n")
    assert json.loads(run(daemon, "advice", "--json")[1])["changes"] == {}
    kinds = [json.loads(line)["kind"] for line in run(daemon, "events", "--json")[1].splitlines()]
    assert set(kinds) == {"agent", "report", "generation"}
    code, _, error = run(daemon, "knobs", "set", "stride=3", "--min-effect", "0.1")
    assert (code, "give --canary too" in error) == (2, True)
    code, _, error = run(daemon, "rollback", "99")
    assert (code, "has no generation 99" in error) == (1, True)


def test_watching_and_following(daemon: Daemon) -> None:
    """Both go on until Ctrl-C, which is no error."""
    agent = Agent(daemon, "llama-7b")
    env = environment(daemon.state, TIDEGATE_DAEMON=daemon.url)
    for words, said in (
        (("status", "--watch"), "llama-7b"),
        (("events", "--follow"), "generation 1 proposed: stride=4"),
    ):
        process = forked.Popen(
            [sys.executable, "-m", "tidegate", *words], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        if "events" in words:
            daemon.client().set_knobs("llama-7b", {"stride": 4}, wait=0)
            agent.answer()
        else:
            wait_until(lambda: _asked(daemon, "/v1/runs") > 1, "the second look", 20)
        if "events" in words:
            while said not in (line := process.stdout.readline()):
                assert line, "it ended"
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "events" in words or said in text


def test_what_was_told_is_no_news_when_the_daemon_is_back(tmp_path: Path) -> None:
    """The effect of a generation is measured anew after the restart, and the rank says hello again, then as another
    agent; states stay the same."""
    with daemon_process(tmp_path) as live:
        agent = Agent(live, "llama-7b").begin()  # type: ignore[arg-type]
        agent.train(4, 1.0)
        live.client().set_knobs("llama-7b", {"stride": 4}, wait=0)
        for _ in ("votes", "applies"):
            agent.answer()
        agent.train(4, 1.0)
        env = environment(tmp_path, TIDEGATE_DAEMON=live.url)
        follower = forked.Popen(
            [sys.executable, "-m", "tidegate", "events", "--follow"], cwd=ROOT, env=env, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert follower.stdout is not None
        lines = [follower.stdout.readline()]
        while "generation 1 applied" not in lines[-1]:
            lines.append(follower.stdout.readline())
            assert lines[-1], "it ended"
        live.kill()
        live.start()
        agent.client.hello(agent.message)
        resumed = Agent(live, "llama-7b", replaces=agent.id)  # type: ignore[arg-type]
        resumed.train(4, 2.0)
        resumed.client.goodbye(resumed.id)
        while "rank 0 is finished" not in lines[-1]:
            lines.append(follower.stdout.readline())
            assert lines[-1], "it ended"
        follower.send_signal(signal.SIGINT)
        follower.communicate(timeout=20)
    told = [line.split("  ", 1)[1] for line in lines]
    assert len(told) == len(set(told)), lines
    assert "rank 0 is live\n" in told


def test_who_follows_gives_up_on_a_daemon_that_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(watch, "PAUSE_SECONDS", 0.01)
    tries = itertools.count()

    class Gone(DaemonClient):
        def events(self, run: str, last_event_id: int | None = None) -> Iterator[Event]:
            assert next(tries) < 200, "it goes on for ever"
            yield from super().events(run, last_event_id)

    with Gone("http://127.0.0.1:9", "token") as client, pytest.raises(DaemonUnreachable):
        watch._print_events(client, "llama-7b", 0, None, False, watch.PrintedStates())
    assert next(tries) > 1, "it is patient for a while"


class Scripted(DaemonClient):
    """Its events are those that a test names."""

    def __init__(self, *given: Event) -> None:
        super().__init__("http://127.0.0.1:9", "token")
        self._given = given

    def events(self, run: str, last_event_id: int | None = None) -> Iterator[Event]:
        yield from self._given


def test_no_line_of_a_reason_looks_like_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = "Rank 0 refused: no\n23:59:59  generation 7 applied"
    event = Event(
        id=1,
        kind="generation",
        run="llama",
        timestamp=1.0,
        data={"generation": 1, "state": "refused", "outcome": outcome},
    )
    with Scripted(event) as client:
        watch._print_events(client, "llama", 0, 1, False, watch.PrintedStates())
    first, *more = capsys.readouterr().out.splitlines()
    assert "Rank 0 refused" in first
    assert [line.lstrip() for line in more] == ["23:59:59  generation 7 applied"]
    assert more[0].startswith(" " * 10)


@pytest.mark.parametrize(
    ("kind", "timestamp", "data"),
    [
        ("agent", 1e300, {}),
        ("agent", 1.0, {"rank": "x"}),
        ("generation", 1.0, {"generation": []}),
        ("generation", 1.0, {"generation": 1, "canary": "x"}),
        ("generation", 1.0, {"generation": 1, "knobs": 7, "state": "committed"}),
    ],
)
def test_an_event_of_another_form_is_an_error_with_a_sentence(
    kind: str, timestamp: float, data: dict[str, Any]
) -> None:
    event = Event(id=1, kind=kind, run="llama", timestamp=timestamp, data=data)
    with Scripted(event) as client, pytest.raises(DaemonError, match="event 1"):
        watch._print_events(client, "llama", 0, 1, False, watch.PrintedStates())


def _asked(daemon: Daemon, route: str) -> float:
    text = daemon.http("GET", "/metrics", None).text
    prefix = f'tidegate_requests_total{{method="GET",route="{route}",status="2xx"}} '
    return next((float(line.removeprefix(prefix)) for line in text.splitlines() if line.startswith(prefix)), 0.0)


def test_several_runs(daemon: Daemon) -> None:
    names = sorted(new_run() for _ in range(2))
    for name in names:
        Agent(daemon, name)
    code, _, error = run(daemon, "knobs", "get")
    assert code == 2
    assert all(name in error for name in names)


def test_runs_that_ended_are_named_newest_first(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as live:
        for number in range(12):
            agent = Agent(live, f"run-{number:02}")  # type: ignore[arg-type]
            agent.client.goodbye(agent.id)
        code, _, error = run(Daemon(live.url, tmp_path, {}), "knobs", "get")
    assert code == 1
    assert f"Earlier ones, newest first: {', '.join(f'run-{n:02}' for n in range(11, 1, -1))}." in error


def test_deleting_runs(daemon: Daemon) -> None:
    agents = [Agent(daemon, name) for name in ("old", "older", "trains")]
    for agent in agents[:2]:
        agent.client.goodbye(agent.id)
    code, _, error = run(daemon, "runs", "delete", "old", "older")
    assert (code, "no terminal to ask on. Add --yes to delete old, older." in error) == (2, True), error
    code, _, error = run(daemon, "runs", "delete", "old", "no-such", "--yes")
    assert (code, "no run 'no-such'" in error) == (1, True), error
    code, _, error = run(daemon, "runs", "delete", "trains", "--yes")
    assert (code, "Run 'trains' is running (rank 0 is live)" in error) == (1, True), error
    assert {view.run for view in daemon.client().runs()} == {"old", "older", "trains"}
    for answer, said in (("n", "Nothing was deleted."), ("y", "Run 'old' is deleted.")):
        assert said in asked_on_a_terminal(daemon, answer, "runs", "delete", "old", "--reason", "a trial")
    assert run(daemon, "runs", "delete", "older", "--yes")[:2] == (0, "Run 'older' is deleted.\n")
    assert [view.run for view in daemon.client().runs()] == ["trains"]
    deleted = [(row.run, row.reason) for row in daemon.client().audit() if row.action == "deleted"]
    assert deleted == [("old", "a trial"), ("older", "")]


def asked_on_a_terminal(daemon: Daemon, answer: str, *words: str) -> str:
    """All that it printed."""
    ours, theirs = pty.openpty()
    env = environment(daemon.state, TIDEGATE_DAEMON=daemon.url)
    process = forked.Popen(
        [sys.executable, "-m", "tidegate", *words], cwd=ROOT, env=env, text=True, stdin=theirs,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    text, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, text
    return str(text)


def test_trace(daemon: Daemon, tmp_path: Path) -> None:
    agent, path = Agent(daemon, "llama-7b"), tmp_path / "trace.json"
    code, _, error = run(daemon, "trace", "-o", str(path))
    assert (code, "has not sent a timeline yet" in error) == (1, True)
    spans = tuple(
        SpanRow(op=n, kind=kind, lane=lane, subgroup=0, start=n, end=n + 1.0, nbytes=0, numel=10)
        for n, (kind, lane) in enumerate((("state_h2d", "h2d"), ("device_update", "device"), ("of_the_future", "cpu")))
    )
    phases = (PhaseRow(phase="update", start=0.0, end=2.0),)
    view = TimelineView(step=3, source="measured", origin=5.0, phases=phases, spans=spans, num_spans=3, deps={1: (0,)})
    agent.say(timeline=view)
    code, text, _ = run(daemon, "trace", "-o", str(path))
    assert (code, str(path) in text) == (0, True)
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"state_h2d 0", "device_update 0", "update"} <= names
    code, _, error = run(daemon, "trace", "-o", str(tmp_path / "no" / "where.json"))
    assert (code, "cannot be written" in error) == (1, True)


def test_tokens(daemon: Daemon) -> None:
    code, token, _ = run(daemon, "token", "create", "read", "--name", "grafana", "--run", "one", "--expires", "12h")
    daemon.tokens["grafana"] = token.strip()
    assert code == 0
    wait_until(lambda: daemon.http("GET", "/v1/runs", "grafana").status_code == 200, "the new token")
    assert daemon.http("PATCH", "/v1/runs/x/knobs", "grafana").status_code == 403
    assert "grafana" in run(daemon, "token", "list")[1]
    (row,) = (row for row in json.loads(run(daemon, "token", "list", "--json")[1]) if row["name"] == "grafana")
    assert (row["scope"], row["run"], row["state"]) == ("read", "one", "valid")
    assert row["ends"] - row["made"] == pytest.approx(12 * 3600, abs=60)
    code, text, _ = run(daemon, "token", "revoke", row["id"])
    assert (code, token.strip() in text) == (0, False)
    wait_until(lambda: daemon.http("GET", "/v1/runs", "grafana").status_code == 401, "the end of the token")
    assert daemon.http("GET", "/v1/runs", "grafana").json()["type"] == "revoked-token"
    made, withdrawn = (r for r in daemon.client().audit() if r.after.get("token") == row["id"])
    assert (made.action, made.run, made.after["scope"], made.after["name"]) == (
        "token_created",
        "one",
        "read",
        "grafana",
    )
    assert (withdrawn.action, withdrawn.actor) == ("token_revoked", made.actor)
    assert "@" in made.actor
    assert run(daemon, "token", "revoke", row["id"])[0] == 0
    assert [r.action for r in daemon.client().audit()].count("token_revoked") == 1, "it had been withdrawn already"


@pytest.mark.parametrize("words", [("create", "read"), ("list",), ("revoke", "x")])
def test_tokens_of_no_daemon(tmp_path: Path, words: tuple[str, ...]) -> None:
    code, out, error = run(None, "token", *words, state=tmp_path / "none")
    assert (code, out, "--state-dir" in error, error.count("\n")) == (2, "", True, 0)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_token_that_waits_in_vain_for_the_database_is_not_made(daemon: Daemon) -> None:
    with contextlib.closing(sqlite3.connect(daemon.state / "tidegate.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        code, out, error = run(daemon, "token", "create", "read")
        other.execute("ROLLBACK")
    assert (code, out) == (1, "")
    assert error.endswith("cannot be opened: database is locked; try again. No token was made.")


def test_doctor(daemon: Daemon) -> None:
    code, text, _ = run(daemon, "doctor")
    assert (code, "mode 0600" in text, f"not needed: the daemon runs at {daemon.url}" in text) == (0, True, True)
    (daemon.state / "agent.token").chmod(0o644)
    code, text, _ = run(daemon, "doctor", "--json")
    bad = [finding["check"] for finding in json.loads(text) if finding["verdict"] == "bad"]
    assert (code, bad) == (1, ["agent token"])


ESCAPES = "\x1b]0;yours\x07\x9b2J\x1b[1A\u202e"
"""Another title, an empty screen, a line up, and text from right to left."""


def test_no_text_from_outside_reaches_the_terminal_as_an_order(daemon: Daemon) -> None:
    name = new_run()
    said = hello(name, world_size=1, host=f"h{ESCAPES}", policy=ESCAPES)
    with daemon.client("agent") as agent, daemon.client() as operator:
        agent.hello(said)
        told = {"stride": 2.0, ESCAPES: ESCAPES}
        agent.report(said.agent, AgentReport(
            timestamp=time.time(), step=1, phase=f"p{ESCAPES}", generation=0, effective=told
        ))  # fmt: skip
        operator.set_knobs(name, {"stride": 3}, reason=f"because {ESCAPES}", wait=0.0)
        proposed = agent.directive(said.agent, 0, None, 0.0).proposed
        assert proposed is not None
        agent.vote(said.agent, Vote(generation=proposed, can=False, reason=f"no {ESCAPES}"))
        commands = [
            ("status",), ("status", "--all"), ("history", "--run", name), ("events", "--run", name),
            ("knobs", "get", "--run", name), ("advice", "--run", name), ("events", "--run", name, "--json"),
            ("status", "--json"), ("knobs", "set", "stride=4", "--run", f"x{ESCAPES}"),
        ]  # fmt: skip
        seen = ""
        for words in commands:
            _, out, err = run(daemon, *words)
            seen += out + err
            assert [c for c in out + err if c in "\x07\x1b\x9b\u202e"] == [], words
        assert "because \\u001b]0;yours\\u0007\\u009b2J\\u001b[1A\\u202e" in seen
        agent.goodbye(said.agent)


NOT_UTF8 = "a\udcff"
"""As Python reads a word of a command line that holds the byte 0xff."""


@pytest.mark.parametrize(
    "words",
    [
        "token create read --name", "token create read --run", "token revoke", "token list --database-url",
        "status --run", "events --run", "history --run", "advice --run", "trace --run", "rollback --reason",
        "knobs get", "knobs set stride=3 --run", "knobs set stride=3 --reason", "knobs set", "status --daemon",
        "doctor --daemon", "doctor --endpoint", "train --run", "train --advertise-host", "demo --metrics-bind",
        "demo --daemon", "daemon --bind", "daemon --advertise-address", "daemon --allowed-host",
        "daemon --database-url", "dashboard --bind", "dashboard --allowed-host",
    ],
)  # fmt: skip
def test_text_that_is_not_utf8_is_refused_with_a_sentence(tmp_path: Path, words: str) -> None:
    code, out, error = run(None, *words.split(), NOT_UTF8, state=tmp_path, TIDEGATE_DAEMON="http://127.0.0.1:9")
    assert (code, out, error.count("\n")) == (2, "", 0), error
    assert error.startswith("tidegate: ")
    assert "'a\\udcff' has characters that are not valid UTF-8" in error


def test_an_address_in_the_environment_that_is_not_utf8_is_refused_with_a_sentence(tmp_path: Path) -> None:
    code, _, error = run(None, "status", state=tmp_path, TIDEGATE_DAEMON=f"http://{NOT_UTF8}")
    assert (code, error.count("\n"), "TIDEGATE_DAEMON" in error) == (2, 0, True), error
