"""Which runs the daemon keeps: quotas of tokens, room for newcomers, an end of old runs, and deletion."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import TypeAdapter

from tests.daemon.live import Agent, Daemon, hello, new_run, step_report, threaded, wait_until
from tidegate.daemon.control import retention
from tidegate.daemon.control.bounded_answer import (
    MAX_BYTES,
    REFUSAL_CHARACTERS,
    bounded_generations,
    bounded_knobs,
    bounded_runs,
)
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.control.run import Clocks
from tidegate.daemon.control.serializers import generation_view, knobs_view, run_view
from tidegate.daemon.control.step_memory import fit_into_memory, memory_of
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.routes import knobs as knobs_route
from tidegate.daemon.storage.store import Store
from tidegate.errors import DaemonError, NotFound
from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentReport
from tidegate.wire.knobs import GenerationView, KnobsView, RankKnobs
from tidegate.wire.run import RunView
from tidegate.wire.step import LinkRow, PathRow, PathState, StallRow, StepReport

DAY = 86_400.0
KNOBS = Knobs(stride=2.0)


class Stand:
    """A control plane on a real database, by a clock of the test's."""

    def __init__(self, folder: Path, now: float = 1_800_000_000.0) -> None:
        self.folder, self.now = folder, now
        self.open()

    def open(self) -> None:
        self.store = Store(f"sqlite:///{self.folder / 'tidegate.db'}")
        clock = Clocks(wall=lambda: self.now, mono=lambda: self.now)
        self.plane = ControlPlane(self.store, lease_seconds=10.0, clock=clock)

    def again(self) -> None:
        """As a daemon that ends and starts."""
        self.plane.save_all()
        self.store.close()
        self.open()

    def begin(self, run: str, owner: str = "", rank: int = 0) -> str:
        message = hello(run, rank, started_at=self.now)
        self.plane.hello(message, KNOBS, owner)
        self.now += 0.001
        return message.agent

    def lose(self) -> None:
        """All that is there goes without a word."""
        self.now += 31.0
        self.plane.tick()

    @property
    def runs(self) -> set[str]:
        return set(self.plane.registry.runs)


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten runs, four of a token that go on; 30 ranks, 8 of a token."""
    for name, value in (("RUNS_KEPT", 10), ("RUNS_OF_A_TOKEN", 4), ("RANKS_KEPT", 30), ("RANKS_OF_A_TOKEN", 8)):
        monkeypatch.setattr(retention, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("restarted", [False, True])
def test_runs_of_one_token_leave_room_for_those_of_another(stand: Stand, restarted: bool) -> None:
    for number in range(4):
        stand.begin(f"junk-{number}", "a")
    if restarted:
        stand.again()
    with pytest.raises(ProblemError, match="4 runs of this token are running, at most 4 are allowed") as refused:
        stand.begin("junk-4", "a")
    assert (refused.value.status, refused.value.type) == (409, "too-many-runs")
    stand.begin("honest", "b")
    assert stand.runs == {*(f"junk-{number}" for number in range(4)), "honest"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("restarted", [False, True])
def test_runs_that_ended_make_room_for_a_newcomer(stand: Stand, restarted: bool) -> None:
    """Those of the token that has most go, the oldest first: 40 of one token, and one of another from before them."""
    stand.begin("first", "b")
    stand.lose()
    for number in range(40):
        stand.begin(f"junk-{number}", "a")
        stand.lose()
    if restarted:
        stand.again()
    stand.begin("honest", "b")
    assert stand.runs == {"first", "honest", *(f"junk-{number}" for number in range(32, 40))}
    row = next(row for row in stand.store.audit("junk-31", 10) if row.action == "deleted")
    assert (row.actor, "The daemon is full (10 runs, 30 ranks)" in row.reason) == ("daemon", True)


@pytest.mark.usefixtures("small")
def test_runs_that_are_lost_cannot_be_revived_beyond_the_quota(stand: Stand) -> None:
    agents = [stand.begin(f"junk-{number}", "a") for number in range(4)]
    stand.lose()
    others = [stand.begin(f"more-{number}", "a") for number in range(4)]
    report = AgentReport(timestamp=stand.now, step=1, phase="other", generation=0, effective={})
    with pytest.raises(ProblemError, match="4 runs of this token are running"):
        stand.plane.report(agents[0], report)
    with pytest.raises(ProblemError, match="4 runs of this token are running"):
        stand.begin("junk-1", "a")
    stand.plane.report(others[0], report)
    stand.plane.goodbye(others[0])
    stand.plane.report(agents[0], report)


@pytest.mark.usefixtures("small")
def test_ranks_of_one_token_leave_room_for_those_of_another(stand: Stand) -> None:
    agents = [stand.begin("wide", "a", rank) for rank in range(8)]
    with pytest.raises(ProblemError, match="8 ranks of this token are running, at most 8 are allowed"):
        stand.begin("wide", "a", 8)
    message = hello("wide", 3, agent=agents[3])
    stand.plane.hello(message, KNOBS, "a")
    for rank in range(8):
        stand.begin("honest", "b", rank)
    assert len(stand.plane.registry.agents) == 16


@pytest.mark.usefixtures("small")
def test_where_all_runs_go_on_a_newcomer_is_told(stand: Stand) -> None:
    for number in range(10):
        stand.begin(f"run-{number}", f"token-{number}")
    with pytest.raises(ProblemError, match="keeps 10 runs and 30 ranks, and all are running: end some"):
        stand.begin("one-more", "b")


def test_each_agent_token_has_a_quota_over_a_restart_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "RUNS_OF_A_TOKEN", 3)
    with threaded(tmp_path) as daemon:
        for number in range(3):
            Agent(daemon, f"junk-{number}")
        other = daemon.app.state.plane.store.tokens.issue("agent", "team")
        with pytest.raises(DaemonError, match="3 runs of this token are running") as error:
            Agent(daemon, "junk-3")
        assert error.value.status == 409
        assert "`tidegate token create agent --name TEAM`" in str(error.value)
    for run in ("honest-0", "honest-1"):
        with threaded(tmp_path) as daemon:
            with pytest.raises(DaemonError, match="3 runs of this token are running"):
                Agent(daemon, "junk-3")
            daemon.tokens["agent"] = other
            Agent(daemon, run)
            assert len(daemon.client().runs()) == 3 + int(run[-1]) + 1


def test_runs_that_ended_long_ago_are_forgotten_over_a_restart_too(stand: Stand) -> None:
    for name in ("lost", "finished", "on"):
        agent = stand.begin(name)
        told = (step_report(1),)
        stand.plane.report(agent, AgentReport(timestamp=1.0, step=1, phase="x", generation=0, effective={}, steps=told))
    stand.plane.goodbye(stand.plane.registry.runs["finished"].members[0].hello.agent)
    stand.lose()
    stand.now += 29 * DAY
    stand.begin("on")
    stand.plane.tick()
    assert stand.runs == {"lost", "finished", "on"}
    stand.again()
    stand.now += 2 * DAY
    stand.plane.tick()
    assert stand.runs == {"on"}, "a rank that was there at the restart is no longer there, and its time is not over"
    stand.again()
    assert stand.runs == {"on"}
    rows = [row for row in stand.store.audit(None, 100) if row.action == "deleted"]
    assert {(row.run, row.actor, row.reason) for row in rows} == {
        (run, "daemon", "It ended more than 30 days ago (--keep-runs).") for run in ("lost", "finished")
    }
    with sqlite3.connect(stand.folder / "tidegate.db") as database:
        for table, column in (("runs", "name"), ("generations", "run"), ("agents", "run")):
            assert {name for (name,) in database.execute(f"SELECT {column} FROM {table}")} == {"on"}
        assert database.execute("SELECT count(*) FROM steps").fetchone() == (0,)


def test_a_sweep_that_fails_is_made_again(stand: Stand) -> None:
    stand.begin("old")
    stand.lose()
    stand.now += 31 * DAY
    with sqlite3.connect(stand.folder / "tidegate.db") as broken:
        broken.execute("ALTER TABLE runs RENAME TO elsewhere")
    with pytest.raises(Exception, match="no such table"):
        stand.plane.tick()
    assert stand.runs == {"old"}
    with sqlite3.connect(stand.folder / "tidegate.db") as broken:
        broken.execute("ALTER TABLE elsewhere RENAME TO runs")
    stand.plane.tick()
    assert stand.runs == set()


def test_a_deleted_run_is_gone_over_a_restart_and_what_comes_back_is_a_new_one(tmp_path: Path) -> None:
    with threaded(tmp_path, lease_seconds=0.3) as daemon:
        agent, client = Agent(daemon, "llama"), daemon.client()
        agent.train(3, 1.0)
        client.set_knobs("llama", {"stride": 5}, wait=0)
        fired = {
            "version": "4",
            "alerts": [
                {"status": "firing", "labels": {"run": "llama", "alertname": "A"}, "startsAt": "2026-03-01T10:00:00Z",
                 "endsAt": "0001-01-01T00:00:00Z", "fingerprint": "0a"},
            ],
        }  # fmt: skip
        assert daemon.http("POST", "/v1/alerts", "alert", json=fired).json()["changed"] == 1
        wait_until(lambda: client.run("llama").liveness == "lost", "the loss")
        client.delete_run("llama", "a trial")
        for asked in (lambda: client.run("llama"), agent.say):
            with pytest.raises(NotFound):
                asked()
        assert client.firing() == []
        (row,) = (row for row in client.audit() if row.action == "deleted")
        assert (row.run, row.reason) == ("llama", "a trial")
        assert row.actor.endswith("(operate)")
    with threaded(tmp_path) as daemon:
        client = daemon.client()
        assert (client.runs(), client.firing()) == ([], [])
        assert {row.action for row in client.audit()} >= {"alert_firing", "proposed", "deleted"}
        agent.client = daemon.client("agent")
        with pytest.raises(NotFound):
            agent.say()
        agent.client.hello(agent.message)
        assert [made.generation for made in client.generations("llama")] == [0]
        assert client.knobs("llama").desired["stride"] == 2.0
        assert client.steps("llama", 0).steps == ()
        assert client.alerts("llama") == []


def test_steps_of_a_deleted_run_do_not_come_back_and_those_of_a_new_one_stay(stand: Stand) -> None:
    agent = stand.begin("llama")
    told = AgentReport(timestamp=1.0, step=1, phase="x", generation=0, effective={}, steps=(step_report(1),))
    stand.plane.report(agent, told)
    stand.plane.goodbye(agent)
    run = stand.plane.registry.runs["llama"]
    stand.plane.retention.delete(run, "ada")
    stand.plane.step_writer.write()
    assert stand.store.steps.newest(agent, 10) == []
    stand.plane.hello(run.members[0].hello, KNOBS)
    stand.plane.report(agent, told)
    stand.plane.step_writer.write()
    assert [step for step, _ in stand.store.steps.newest(agent, 10)] == [1]


@pytest.mark.parametrize("state", ["live", "stale"])
def test_a_run_that_goes_on_is_not_deleted(tmp_path: Path, state: str) -> None:
    with threaded(tmp_path, lease_seconds=60.0) as daemon:
        Agent(daemon, "llama")
    with threaded(tmp_path, lease_seconds=60.0) as daemon:  # stale until it speaks
        if state == "live":
            Agent(daemon, "llama", replaces=daemon.client().run("llama").ranks[0].agent)
        with pytest.raises(
            DaemonError, match=rf"Run 'llama' is running \(rank 0 is {state}\): end its processes"
        ) as error:
            daemon.client().delete_run("llama")
        assert error.value.status == 409
        assert "is lost (180 s after its last message)" in str(error.value)
        assert daemon.client().run("llama").liveness == state


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of the test's own, with tokens that no other test meets."""
    with threaded(tmp_path, forgiven_failures=10**6) as running:
        yield running


def test_who_may_delete_what(own: Daemon) -> None:
    mine, other = new_run(), new_run()
    for run in (mine, other):
        agent = Agent(own, run)
        agent.client.goodbye(agent.id)
    own.tokens["operate of mine"] = own.app.state.plane.store.tokens.issue("operate", "ours", run=mine)

    def delete(run: str, scope: str | None) -> httpx.Response:
        return own.http("DELETE", f"/v1/runs/{run}", scope)

    wait_until(lambda: own.http("GET", f"/v1/runs/{mine}", "operate of mine").status_code == 200, "the token")
    assert delete(other, "operate of mine").json()["type"] == "wrong-run"
    assert [delete(other, scope).status_code for scope in (None, "read", "agent", "alert")] == [401, 403, 403, 403]
    assert own.client().run(other)
    assert [delete(mine, "operate of mine").status_code for _ in range(2)] == [204, 404]
    assert delete(other, "operate").status_code == 204


def test_who_follows_a_run_that_is_deleted_is_let_go(daemon: Daemon) -> None:
    run = new_run()
    agent, client = Agent(daemon, run), daemon.client()
    agent.client.goodbye(agent.id)
    stream = client.events(run, last_event_id=0)
    assert [event.kind for event in itertools.islice(stream, 2)] == ["agent", "agent"]
    daemon.client().delete_run(run)
    assert list(stream) == []


def large(step: int, paths: int = 64) -> StepReport:
    """A step with all that a rank with so many paths tells."""
    return step_report(step).model_copy(
        update={
            "stalls": (StallRow(phase="update", cause="h2d", seconds=0.1),),
            "links": tuple(
                LinkRow(direction=direction, phase=phase, content="state", bytes=step, busy_seconds=0.1)
                for direction in ("d2h", "h2d")
                for phase in ("backward", "update")
            ),
            "paths": tuple(
                PathRow(path=f"{path:032}", operation=operation, phase=phase, bytes=step, busy_seconds=0.1)
                for path in range(paths)
                for operation in ("read", "write")
                for phase in ("backward", "update")
            ),
            "path_states": tuple(PathState(path=f"{path:032}") for path in range(paths)),
        }
    )


def report_of(*steps: StepReport) -> AgentReport:
    newest = steps[-1].step
    return AgentReport(timestamp=float(newest), step=newest, phase="update", generation=0, effective={}, steps=steps)


def test_steps_of_a_token_take_bounded_memory(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that tells little keeps all that it has, and every rank its last step as it was told."""
    little, much = stand.begin("little", "honest"), [stand.begin(f"much{n}", "honest") for n in range(4)]
    stand.plane.report(little, report_of(*map(step_report, range(1, 21))))
    for agent in much:
        stand.plane.report(agent, report_of(*(large(step) for step in range(1, 21))))
    room = 8 * memory_of(large(1))
    monkeypatch.setattr(retention, "STEPS_BYTES_OF_A_TOKEN", room)
    stand.now += 1.0
    stand.plane.tick()
    members = {name: run.members[0] for name, run in stand.plane.registry.runs.items()}
    assert sum(member.recent_bytes for member in members.values()) <= room
    assert [step.step for step in members.pop("little").recent] == [*range(1, 21)]
    for member in members.values():
        assert member.recent[-1] == large(20).model_copy(update={"timestamp": member.recent[-1].timestamp})
        assert 1 < len(member.recent) < 20
        assert member.recent_bytes == sum(map(memory_of, member.recent))


def test_a_step_that_fits_nowhere_is_kept_without_its_rows() -> None:
    steps = [large(1), large(2)]
    assert fit_into_memory(steps, 2 * memory_of(steps[0])) == steps
    assert fit_into_memory(steps, 10_000) == [steps[1].model_copy(update=dict.fromkeys(("stalls", "links", "paths"), ())
        | {"path_states": ()})]  # fmt: skip
    assert fit_into_memory(steps, 100) == []
    last, before = reversed(fit_into_memory(steps, memory_of(steps[0]) + 200_000))
    assert last == steps[1]
    assert {row.direction: row.bytes for row in before.links} == {"d2h": 2, "h2d": 2}, "over both phases"
    assert len(before.paths) == 128
    assert {row.bytes for row in before.paths} == {2}


def test_the_last_steps_of_512_ranks_with_64_paths_fit() -> None:
    assert 512 * memory_of(large(1)) < retention.STEPS_BYTES_OF_A_TOKEN


def test_all_runs_are_told_in_an_answer_that_clients_take(stand: Stand) -> None:
    """However much ranks tell. What is left out is that of the ranks that tell most."""
    for name in ("little", "much", "more"):
        stand.plane.report(stand.begin(name), report_of(large(1, {"little": 1, "much": 30, "more": 60}[name])))
    views = [run_view(run, stand.plane.registry.states(run)) for run in stand.plane.registry.runs.values()]
    full = sum(len(view.model_dump_json()) for view in views)
    for most, figures, ranks in ((full + 100, 3, 3), (full - 100, 2, 3), (4_000, 1, 3), (3_000, 0, 3), (1_500, 0, 1)):
        made = bounded_runs(views, most)
        assert sum(map(len, made)) < most
        told = [RunView.model_validate_json(text) for text in made]
        assert [view.run for view in told] == ["little", "much", "more"]
        assert sum(bool(view.ranks) for view in told) >= ranks, most
        assert sum(any(rank.last_step for rank in view.ranks) for view in told) >= figures, most
        assert not figures or told[0].ranks[0].last_step is not None, "the one that tells least"


def test_the_knobs_of_all_ranks_are_in_an_answer_that_clients_accept(stand: Stand) -> None:
    """The most that ranks can report: knobs with 6,000 characters, and reasons of refusals with 2,000."""
    stand.begin("llama")
    (run,) = stand.plane.registry.runs.values()
    view = knobs_view(run, stand.plane.registry.states(run))
    many = RankKnobs(
        rank=0, liveness="live", applied_generation=1,
        effective={f"knob{number}": "x" * 1_000 for number in range(5)}, refused="\x01" * 2_000,
    )  # fmt: skip
    view = view.model_copy(update={"ranks": tuple(many.model_copy(update={"rank": rank}) for rank in range(100))})
    full = len(view.model_dump_json())
    for max_bytes, knobs, refusal, ranks in (
        (full, 5, 2_000, 100), (full - 1, 0, 2_000, 100), (100_000, 0, REFUSAL_CHARACTERS, 100), (10_000, 0, 0, 0),
    ):  # fmt: skip
        answer = bounded_knobs(view, max_bytes)
        assert len(answer) <= max_bytes
        shown = KnobsView.model_validate_json(answer)
        assert shown.model_copy(update={"ranks": ()}) == view.model_copy(update={"ranks": ()})
        assert len(shown.ranks) == ranks
        assert {(len(rank.effective), len(rank.refused or "")) for rank in shown.ranks} == (
            {(knobs, refusal)} if ranks else set()
        )
    cut = {"effective": {}, "refused": "\x01" * REFUSAL_CHARACTERS, "rank": 999_999, "applied_generation": 10**6}
    assert len(many.model_copy(update=cut).model_dump_json()) * retention.RANKS_KEPT < MAX_BYTES


def test_the_newest_generations_are_in_an_answer_that_clients_accept(stand: Stand) -> None:
    stand.begin("llama")
    (first,) = stand.plane.store.generations("llama")
    view = generation_view("llama", first)
    views = [view.model_copy(update={"generation": number}) for number in range(10)]
    every = TypeAdapter(list[GenerationView])
    full = len(bounded_generations(views))
    for max_bytes, told in ((full, range(10)), (full - 1, range(1, 10)), (len(view.model_dump_json()) + 1, range(0))):
        answer = bounded_generations(views, max_bytes)
        assert len(answer) <= max_bytes
        assert [one.generation for one in every.validate_json(answer)] == [*told]
    assert asyncio.run(knobs_route.generations(stand.plane, "llama")).body == bounded_generations([view])


def test_the_route_of_knobs_is_bounded(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.begin("llama")
    monkeypatch.setattr("tidegate.daemon.routes.knobs.bounded_knobs", lambda view: b'"bounded"')
    answer = asyncio.run(knobs_route.knobs(stand.plane, "llama"))
    assert (answer.body, answer.headers["etag"]) == (b'"bounded"', '"0"')
