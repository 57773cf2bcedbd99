"""Ranks come, report, fall silent, return and leave."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy.exc import SQLAlchemyError

from tests.daemon.live import Agent, Daemon, hello, new_run, step_report, threaded, wait_until
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.control.run import WOKEN_AT_ONCE, Clocks, Notifier
from tidegate.daemon.storage.store import Store
from tidegate.errors import DaemonError, NotFound, RankTaken
from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentReport, Rates, Vote
from tidegate.wire.step import PathRow
from tidegate.wire.timeline import PhaseRow, SpanRow, TimelineView


def test_a_new_run_takes_the_start_up_settings(daemon: Daemon) -> None:
    run = new_run()
    lease = daemon.client("agent").hello(hello(run))
    assert (lease.lease_seconds, lease.directive.committed) == (60.0, 0)
    assert lease.directive.committed_knobs == {"stride": 2.0, "static_ratio": 0.0}
    view = daemon.client("read").run(run)
    assert (view.liveness, view.world_size, [rank.rank for rank in view.ranks]) == ("live", 2, [0])


def test_a_second_live_agent_is_refused(daemon: Daemon) -> None:
    run = new_run()
    Agent(daemon, run)
    with pytest.raises(RankTaken, match=r"Rank 0 of run .* is held by process 4711 on node, which is live"):
        Agent(daemon, run)
    Agent(daemon, run, rank=1)


def test_the_same_agent_may_say_hello_again(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    agent.train(3, 1.0)
    assert agent.client.hello(agent.message).directive.committed == 0
    assert len(agent.client.steps(agent.message.run, 0).steps) == 3


def test_an_agent_is_one_rank(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    with pytest.raises(DaemonError, match="is in use by another rank"):
        agent.client.hello(agent.message.model_copy(update={"run": new_run()}))


def test_a_stale_rank_can_be_taken_over(hasty: Daemon) -> None:
    run = new_run()
    old = Agent(hasty, run)
    wait_until(lambda: hasty.client().run(run).liveness == "stale", "stale")
    new = Agent(hasty, run)
    with pytest.raises(NotFound, match="register it first"):
        old.say()
    new.say()
    assert hasty.client().run(run).ranks[0].agent == new.id


@pytest.mark.parametrize("call", ["report", "vote", "directive", "goodbye"])
def test_unknown_agents(daemon: Daemon, call: str) -> None:
    client = daemon.client("agent")
    report = AgentReport(timestamp=time.time(), step=0, phase="other", generation=0, effective={})
    calls: dict[str, Callable[[], object]] = {
        "report": lambda: client.report("nobody", report),
        "vote": lambda: client.vote("nobody", Vote(generation=1, can=True)),
        "directive": lambda: client.directive("nobody", 0, None, 0.0),
        "goodbye": lambda: client.goodbye("nobody"),
    }
    with pytest.raises(NotFound, match="does not know agent 'nobody'"):
        calls[call]()
    answer = daemon.http("DELETE", "/v1/agents/nobody", "agent")
    assert answer.json()["type"] == "unknown-agent"


def test_live_stale_lost_and_back(hasty: Daemon) -> None:
    run, client = new_run(), hasty.client()
    agent = Agent(hasty, run)
    seen: list[str] = []

    def watch() -> bool:
        state = client.run(run).liveness
        if state not in seen:
            seen.append(state)
        return state == "lost"

    wait_until(watch, "lost")
    assert seen == ["live", "stale", "lost"]
    wait_until(lambda: [row.action for row in client.audit(run)] == ["lost"], "the audit row")
    agent.say()
    assert client.run(run).liveness == "live"


def test_a_lost_rank_need_not_vote(hasty: Daemon) -> None:
    run, client = new_run(), hasty.client()
    Agent(hasty, run)
    wait_until(lambda: client.run(run).liveness == "lost", "lost")
    wait_until(lambda: client.set_knobs(run, {"stride": 3}).state == "committed", "committed without it")


def test_a_stale_rank_must_vote(hasty: Daemon) -> None:
    """It may only be slow: what it has not agreed to is not forced on it."""
    run, client = new_run(), hasty.client()
    agent = Agent(hasty, run)
    wait_until(lambda: client.run(run).liveness == "stale", "stale")
    assert client.set_knobs(run, {"stride": 3}, wait=0).state == "proposed"
    agent.answer()
    assert client.generations(run)[1].state == "committed"


def test_the_run_is_as_live_as_its_worst_rank(hasty: Daemon) -> None:
    run, client = new_run(), hasty.client()
    first, second = Agent(hasty, run, 0), Agent(hasty, run, 1)
    first.client.goodbye(first.id)
    assert client.run(run).liveness == "live"
    second.client.goodbye(second.id)
    assert client.run(run).liveness == "finished"


def test_goodbye(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    agent.client.goodbye(agent.id)
    agent.client.goodbye(agent.id)
    with pytest.raises(NotFound):
        agent.say()
    assert daemon.client().run(agent.message.run).liveness == "finished"
    Agent(daemon, agent.message.run)


def test_finished_is_a_goodbye(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    agent.train(2, 1.0)
    agent.say(finished=True)
    agent.client.goodbye(agent.id)
    view = daemon.client().run(agent.message.run)
    assert (view.liveness, view.ranks[0].step) == ("finished", 2)


def test_steps_are_kept_once_and_bounded(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    agent.say(step=3, steps=tuple(step_report(n) for n in (1, 2, 3)))
    agent.say(step=4, steps=tuple(step_report(n) for n in (2, 3, 4)))
    client = daemon.client("read")
    assert [step.step for step in client.steps(agent.message.run, 0).steps] == [1, 2, 3, 4]
    agent.step = 4
    for _ in range(3):
        agent.train(200, 1.0)
    steps = client.steps(agent.message.run, 0, limit=256).steps
    assert (len(steps), steps[-1].step) == (256, 604)
    assert len(client.steps(agent.message.run, 0, limit=10).steps) == 10
    assert client.run(agent.message.run).ranks[0].last_step == steps[-1]


def test_timeline(daemon: Daemon) -> None:
    agent, client = Agent(daemon, new_run()), daemon.client("read")
    assert client.timeline(agent.message.run, 0) is None
    with pytest.raises(NotFound, match=r"has no rank 5\. Its ranks: 0"):
        client.timeline(agent.message.run, 5)
    span = SpanRow(op=0, kind="cpu_update", lane="cpu", subgroup=0, start=0.0, end=1.0, nbytes=0, numel=10)
    phases = (PhaseRow(phase="update", start=0.0, end=1.0),)
    sent = TimelineView(
        step=7, source="measured", origin=1.0, phases=phases, spans=(span,), num_spans=1, deps={0: (), 1: (0,)}
    )
    agent.say(timeline=sent)
    agent.say()
    assert client.timeline(agent.message.run, 0) == sent


def test_a_prediction_is_passed_on_and_is_the_newest(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client("read")
    first, second = Agent(daemon, run, 0), Agent(daemon, run, 1)

    def seen() -> list[float | None]:
        return [rank.predicted_update_seconds for rank in client.run(run).ranks]

    first.say()
    assert seen() == [None, None]
    first.say(predicted_update_seconds=0.25)
    second.say(predicted_update_seconds=0.5)
    assert seen() == [0.25, 0.5]
    assert [rank.predicted_update_seconds for view in client.runs() if view.run == run for rank in view.ranks] == seen()
    first.say(predicted_update_seconds=0.125)
    second.say()
    assert seen() == [0.125, None], "a rank that has no prediction any more has none"


def test_a_loss_that_is_no_number(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    agent.say(steps=(step_report(1).model_copy(update={"loss": float("nan")}),))
    assert daemon.client().steps(agent.message.run, 0).steps[0].loss is None


def test_applied_is_believed_from_reports_too(daemon: Daemon) -> None:
    """Its own message may have been lost with an earlier daemon."""
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run)
    client.set_knobs(run, {"stride": 3}, wait=0)
    agent.vote(1)
    agent.say(generation=1, step=11)
    assert client.generations(run)[1].state == "committed"
    agent.say(generation=1, step=12)
    assert (client.generations(run)[1].state, client.generations(run)[1].applied) == ("applied", {0: 12})


def test_a_long_poll_ends_with_a_proposal_and_not_before(daemon: Daemon) -> None:
    agent, client = Agent(daemon, new_run()), daemon.client()
    begin = time.monotonic()
    assert agent.client.directive(agent.id, 0, None, 0.3).proposed is None
    assert time.monotonic() - begin >= 0.3
    client.set_knobs(agent.message.run, {"stride": 3}, wait=0)
    begin = time.monotonic()
    assert agent.client.directive(agent.id, 0, None, 30.0).proposed == 1
    assert agent.client.directive(agent.id, 0, 1, 0.0).proposed == 1
    assert time.monotonic() - begin < 5.0


def sd(daemon: Daemon, run: str) -> list[dict[str, object]]:
    answer = httpx.get(f"{daemon.url}/sd", trust_env=False)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    return [entry for entry in answer.json() if entry["labels"]["run"] == run]


def test_service_discovery(hasty: Daemon) -> None:
    run = new_run()
    agent = Agent(hasty, run, 3, metrics_address="node-7:9403", host="node-7")
    Agent(hasty, run, 4, metrics_address="")
    entry = {
        "targets": ["node-7:9403"],
        "labels": {"run": run, "rank": "3", "host": "node-7", "device_kind": "emulated"},
    }
    assert sd(hasty, run) == [entry]
    wait_until(lambda: hasty.client().run(run).ranks[0].liveness == "stale", "stale")
    agent.say()
    assert sd(hasty, run) == [entry]
    agent.client.goodbye(agent.id)
    assert sd(hasty, run) == []


def test_service_discovery_forgets_the_lost(hasty: Daemon) -> None:
    agent = Agent(hasty, new_run())
    wait_until(lambda: sd(hasty, agent.message.run) == [], "an empty list")


def test_metrics(hasty: Daemon) -> None:
    run = new_run()
    Agent(hasty, run, 0)
    agent = Agent(hasty, run, 1)
    agent.client.goodbye(agent.id)
    text = httpx.get(f"{hasty.url}/metrics", trust_env=False).text
    assert f'tidegate_agents{{run="{run}",state="finished"}} 1.0' in text
    assert f'tidegate_desired_generation{{run="{run}"}} 0.0' in text
    assert 'tidegate_requests_total{method="DELETE",route="/v1/agents/{agent}",status="2xx"}' in text
    assert 'tidegate_request_seconds_bucket{le="0.001",method="POST",route="/v1/agents"}' in text
    assert "_created" not in text


def test_the_audit_log_is_append_only(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    agent.client.goodbye(agent.id)
    connection = sqlite3.connect(daemon.state / "tidegate.db")
    for statement in ("DELETE FROM audit", "UPDATE audit SET actor = 'nobody'"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("silent", [31.0, 12.0], ids=["lost before", "lost after"])
def test_ranks_that_a_run_is_started_again_without_are_lost_no_longer(tmp_path: Path, silent: float) -> None:
    """Three ranks die, one or two come back: by a clock of the test's."""
    now = [1000.0]
    clock, knobs = Clocks(wall=lambda: now[0], mono=lambda: now[0]), Knobs(stride=2.0, static_ratio=0.0)
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    plane = ControlPlane(store, lease_seconds=10.0, clock=clock)
    for rank in range(3):
        plane.hello(hello("llama", rank, world_size=3, started_at=now[0]), knobs)
    run = plane.registry.run("llama")
    now[0] += silent
    plane.tick()
    again = hello("llama", 0, world_size=2, started_at=now[0])
    plane.hello(again, knobs)
    for _ in range(4):  # 32 s
        now[0] += 8.0
        plane.report(again.agent, AgentReport(timestamp=now[0], step=1, phase="x", generation=0, effective={}))
        plane.tick()
    assert plane.registry.states(run) == {0: "live", 1: "lost", 2: "finished"}, "rank 1 should be there"
    (row,) = (row for row in store.audit("llama", 100) if row.action == "goodbye")
    assert row.actor == "daemon"
    assert row.reason == "Rank 2 is lost and the run goes on with 2 ranks."
    assert ControlPlane(store, clock=clock).registry.states(run)[2] == "finished"
    store.close()


def test_timelines_of_before_are_kept(daemon: Daemon) -> None:
    agent, client = Agent(daemon, new_run()), daemon.client("read")
    run = agent.message.run
    assert client.timelines(run, 0).steps == ()
    sent = {
        step: TimelineView(step=step, source="measured", origin=1.0, phases=(), spans=(), num_spans=0)
        for step in (3, 4, 5)
    }
    for view in sent.values():
        agent.say(timeline=view)
    assert client.timelines(run, 0).steps == (3, 5), "one in a few seconds, and the newest"
    assert client.timeline(run, 0, 3) == sent[3]
    assert client.timeline(run, 0, 5) == client.timeline(run, 0) == sent[5]
    with pytest.raises(NotFound, match=r"no timeline of step 4 of rank 0\. The newest steps with a timeline: 3, 5"):
        client.timeline(run, 0, 4)


def test_the_rates_of_a_rank_are_its_newest(daemon: Daemon) -> None:
    agent, client = Agent(daemon, new_run()), daemon.client("read")
    assert client.rates(agent.message.run, 0) is None
    agent.say(rates=Rates(cpu_params_per_second=500.0))
    agent.say()
    assert client.rates(agent.message.run, 0) == Rates(cpu_params_per_second=500.0)


def test_figures_of_all_ranks(daemon: Daemon) -> None:
    """Of the newest step that both have told: sums, and the times of the slowest."""
    run = new_run()
    agents = [Agent(daemon, run, rank, paths=("nvme",)) for rank in (0, 1)]
    client = daemon.client()
    rows = [PathRow(path="nvme", operation=way, phase="update", bytes=5, busy_seconds=0.1) for way in ("read", "write")]

    def tell(rank: int, step: int, update: float) -> None:
        more = {"tokens": 8, "paths": (*rows, rows[0]), "host_memory_bytes": {"cache": 10 + rank}}
        agents[rank].say(steps=(step_report(step, update).model_copy(update=more),))

    tell(0, 1, 1.0)
    assert client.run(run).totals is None, "rank 1 has told nothing"
    tell(1, 1, 3.0)
    tell(0, 2, 9.0)
    totals = client.run(run).totals
    assert totals is not None
    assert (totals.step, totals.ranks, totals.slowest_rank, totals.tokens) == (1, 2, 1, 16)
    assert (totals.step_seconds, totals.update_seconds, totals.exposed_seconds) == (3.1, 3.0, 3.0)
    assert totals.path_bytes == {"nvme": {"read": 20, "write": 10}}
    assert totals.host_memory_bytes == {"cache": 21}
    agents[1].client.goodbye(agents[1].id)
    totals = client.run(run).totals
    assert totals is not None
    assert (totals.step, totals.ranks, totals.step_seconds) == (2, 1, 9.1)


def test_hundreds_that_wait_are_woken_in_turns_and_none_is_forgotten() -> None:
    """Whoever is ready gets a turn of the event loop between them; a ring meets those that wait, and no others."""

    async def waiting() -> tuple[list[int], int]:
        bell, woken, turns = Notifier(), list[int](), 0

        async def one(number: int) -> None:
            await bell.wait(60.0)
            woken.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(100)]
        late = asyncio.create_task(bell.wait(0.0))
        await late
        bell.notify_all()
        tasks.append(asyncio.create_task(one(100)))
        while len(woken) < 100:
            turns += 1
            await asyncio.sleep(0)
        assert not tasks[-1].done(), "it came after the ring"
        bell.notify_all()
        await asyncio.gather(*tasks)
        return woken, turns

    woken, turns = asyncio.run(waiting())
    assert woken == [*range(101)]
    assert turns >= 100 // WOKEN_AT_ONCE


def test_a_hello_that_cannot_be_stored_changes_nothing(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    plane, knobs = ControlPlane(store), Knobs(stride=2.0, static_ratio=0.0)
    first = hello("llama", 0)
    plane.hello(first, knobs)
    plane.goodbye(first.agent)
    member = plane.registry.run("llama").members[0]
    with sqlite3.connect(tmp_path / "tidegate.db") as broken:
        broken.execute("ALTER TABLE agents RENAME TO elsewhere")
    for again in (first.model_copy(update={"pid": 1}), hello("llama", 0)):
        with pytest.raises(SQLAlchemyError):
            plane.hello(again, knobs)
        assert plane.registry.run("llama").members == {0: member}
        assert (member.hello, member.ended, member.announced) == (first, "finished", "finished")
    store.close()


def test_knobs_that_could_not_be_reset_are_reset_by_the_next_hello(tmp_path: Path) -> None:
    path = tmp_path / "tidegate.db"
    store = Store(f"sqlite:///{path}")
    plane = ControlPlane(store)
    first = hello("llama", 0)
    plane.hello(first, Knobs(stride=2.0, static_ratio=0.0))
    plane.goodbye(first.agent)
    run = plane.registry.run("llama")
    again, knobs = hello("llama", 0, reset_knobs=True), Knobs(stride=5.0, static_ratio=0.0)
    with sqlite3.connect(path) as broken:
        broken.execute("ALTER TABLE generations RENAME TO elsewhere")
    with pytest.raises(SQLAlchemyError):
        plane.hello(again, knobs)
    assert (run.members[0].hello, run.control.newest, run.control.present) == (first, 0, frozenset())
    assert [agent.hello.agent for agent in store.agents()] == [first.agent], "all of it or nothing"
    with sqlite3.connect(path) as broken:
        broken.execute("ALTER TABLE elsewhere RENAME TO generations")
    plane.hello(again, knobs)
    assert run.control.committed.knobs["stride"] == 5.0
    assert [row.action for row in store.audit("llama", 9)][-3:] == ["proposed", "committed", "reset"]
    store.close()


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon:
        names = [Agent(daemon, f"run-{number}").message.run for number in range(3)]
        assert [row["run"] for row in daemon.http("GET", "/v1/runs").json()] == names[::-1]
    with threaded(tmp_path) as daemon:
        assert [row["run"] for row in daemon.http("GET", "/v1/runs").json()] == names[::-1]


def test_an_agent_that_is_known_to_have_ended_is_replaced(daemon: Daemon) -> None:
    run = new_run()
    dead = Agent(daemon, run)
    with pytest.raises(RankTaken):
        Agent(daemon, run, replaces="another")
    Agent(daemon, run, replaces=dead.id, pid=4712)
    with pytest.raises(NotFound):
        dead.say()
    (row,) = (row for row in daemon.client().audit(run) if row.action == "taken over")
    assert row.reason == "Process 4711 on node has ended without a goodbye. Process 4712 has taken over rank 0."


@pytest.mark.parametrize("ended", ["goodbye", "replaced"])
def test_an_agent_that_listens_hears_at_once_that_its_rank_is_not_its_own(daemon: Daemon, ended: str) -> None:
    run = new_run()
    agent = Agent(daemon, run)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        asks = pool.submit(agent.client.directive, agent.id, 0, None, 30.0)
        wait_until(lambda: daemon.app.state.plane.registry.runs[run].directive_notifier._waiting, "the question")
        if ended == "goodbye":
            daemon.client("agent").goodbye(agent.id)
        else:
            Agent(daemon, run, replaces=agent.id)
        with pytest.raises(NotFound):
            asks.result()
    assert time.monotonic() - began < 25


def test_agents_of_before_are_understood(daemon: Daemon) -> None:
    """They know neither their process nor whom they replace."""
    message = hello(new_run()).model_dump(mode="json", exclude={"process", "replaces"})
    assert daemon.http("POST", "/v1/agents", "agent", json=message).status_code == 201


@pytest.mark.parametrize("address", ["node", "http://node:9400/x", "a b:1", "node:0", "node:70000", "x\n:1", "n:١٢"])
def test_a_metrics_address_that_nobody_can_scrape_is_refused(daemon: Daemon, address: str) -> None:
    body = hello(new_run()).model_dump(mode="json") | {"metrics_address": address}
    answer = daemon.http("POST", "/v1/agents", "agent", json=body)
    assert answer.status_code == 422, answer.text
    assert "is no host:port with a port from 1 to 65,535" in answer.json()["detail"]


@pytest.mark.parametrize("address", ["", "node-1.example:9400", "10.0.0.1:1", "[::1]:65535", "::1:9400"])
def test_a_metrics_address_is_taken(daemon: Daemon, address: str) -> None:
    body = hello(new_run()).model_dump(mode="json") | {"metrics_address": address}
    assert daemon.http("POST", "/v1/agents", "agent", json=body).status_code == 201
