"""A run that has failed, or of which no rank is left, stays so until a rank that was started again has done a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.daemon.control.test_retention import DAY, Stand
from tests.daemon.live import Agent, Daemon, new_run, step_report
from tidegate.daemon.control.serializers import run_view
from tidegate.daemon.security.refused_agents import RefusedAgentsBook
from tidegate.daemon.server import metrics
from tidegate.wire.agent import AgentReport
from tidegate.wire.run import Breakdown, RunView


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand(tmp_path)
    monkeypatch.setattr(metrics.time, "time", lambda: made.now)
    return made


def train(stand: Stand, agent: str, step: int) -> None:
    report = AgentReport(
        timestamp=stand.now, step=step, phase="forward", generation=0, effective={}, steps=(step_report(step, 1.0),)
    )
    stand.plane.report(agent, report)
    stand.now += 1.0


def view(stand: Stand) -> RunView:
    run = stand.plane.registry.runs["run"]
    return run_view(run, stand.plane.registry.states(run))


def broken(stand: Stand) -> set[str]:
    """What the metric says of the run: states, with the exception."""
    registry = CollectorRegistry()
    registry.register(metrics.RunCollector(stand.plane, RefusedAgentsBook()))
    (family,) = [one for one in registry.collect() if one.name == "tidegate_run_broken"]
    return {f"{one.labels['state']} {one.labels['error']}".strip() for one in family.samples if one.value}


def start(stand: Stand) -> list[str]:
    stand.now += 1.0
    return [stand.begin("run", rank=rank) for rank in range(2)]


def fail_both(stand: Stand, errors: tuple[str, str] = ("StateLost", "RuntimeError")) -> None:
    agents = start(stand)
    for agent, error in zip(agents, errors, strict=True):
        train(stand, agent, 7)
        stand.plane.goodbye(agent, error)


@pytest.mark.parametrize("daemon_restarts", [False, True])
def test_the_first_rank_that_fails_is_named(stand: Stand, daemon_restarts: bool) -> None:
    fail_both(stand)
    if daemon_restarts:
        stand.again()
    seen = view(stand)
    assert seen.breakdown is not None
    assert (seen.liveness, seen.breakdown.rank, seen.breakdown.step, seen.breakdown.error) == (
        "failed", 0, 7, "StateLost",
    )  # fmt: skip
    assert [rank.liveness for rank in seen.ranks] == ["failed", "failed"]
    assert broken(stand) == {"failed StateLost"}


def test_a_rank_that_the_launcher_has_ended_is_lost_and_the_run_failed(stand: Stand) -> None:
    first, _ = start(stand)
    stand.plane.goodbye(first, "StateLost")
    assert view(stand).liveness == "failed", "although a rank is there"
    stand.lose()
    assert [rank.liveness for rank in view(stand).ranks] == ["failed", "lost"]
    assert broken(stand) == {"failed StateLost"}


@pytest.mark.parametrize("daemon_restarts", [False, True])
def test_a_new_start_has_to_do_a_step(stand: Stand, daemon_restarts: bool) -> None:
    fail_both(stand)
    agents = start(stand)
    assert (view(stand).liveness, broken(stand)) == ("live", {"failed StateLost"})
    if daemon_restarts:
        stand.again()
    train(stand, agents[0], 8)
    assert (view(stand).breakdown, broken(stand)) == (None, set())
    stand.again()
    assert view(stand).breakdown is None


def test_a_last_step_that_was_told_late_is_no_new_start(stand: Stand) -> None:
    first, second = start(stand)
    stand.plane.goodbye(first, "StateLost")
    train(stand, second, 7)
    assert broken(stand) == {"failed StateLost"}


def test_a_new_start_that_fails_before_a_step_is_named(stand: Stand) -> None:
    fail_both(stand)
    for agent in start(stand):
        stand.plane.goodbye(agent, "KeyError")
    seen = view(stand)
    assert seen.breakdown is not None
    assert (seen.liveness, seen.breakdown.rank, seen.breakdown.step) == ("failed", 0, 0)
    assert broken(stand) == {"failed KeyError"}


def test_a_new_start_that_ends_without_a_step_ends_nothing(stand: Stand) -> None:
    """Python keeps no code of `sys.exit(1)`: such a rank looks finished."""
    fail_both(stand)
    for agent in start(stand):
        stand.plane.goodbye(agent)
    assert [rank.liveness for rank in view(stand).ranks] == ["finished", "finished"]
    assert (view(stand).liveness, broken(stand)) == ("failed", {"failed StateLost"})


@pytest.mark.parametrize("how", ["KeyError", "", "lost"])
def test_a_lost_run_stays_lost_until_a_new_start_has_done_a_step(stand: Stand, how: str) -> None:
    start(stand)
    stand.lose()
    assert (view(stand).liveness, broken(stand)) == ("lost", {"lost"})
    agents = start(stand)
    assert (view(stand).liveness, broken(stand)) == ("live", {"lost"})
    if how == "lost":
        stand.lose()
    else:
        for agent in agents:
            stand.plane.goodbye(agent, how)
    assert broken(stand) == {"lost", *([f"failed {how}"] if how == "KeyError" else [])}
    assert view(stand).liveness == ("failed" if how == "KeyError" else "lost")
    train(stand, start(stand)[1], 3)
    assert broken(stand) == set()


def test_processes_that_were_out_of_reach_need_no_step(stand: Stand) -> None:
    agents = start(stand)
    stand.lose()
    report = AgentReport(timestamp=stand.now, step=0, phase="other", generation=0, effective={})
    stand.plane.report(agents[1], report)
    assert (view(stand).breakdown, broken(stand)) == (None, set())


def test_one_lost_rank_is_no_lost_run_until_the_others_have_gone(stand: Stand) -> None:
    first, _ = start(stand)
    stand.now += 20.0
    train(stand, first, 1)
    stand.now += 15.0
    train(stand, first, 2)
    stand.plane.tick()
    assert ([rank.liveness for rank in view(stand).ranks], broken(stand)) == (["live", "lost"], set())
    stand.plane.goodbye(first)
    assert broken(stand) == {"lost"}


def test_a_run_that_was_given_up_is_no_news_after_a_day(stand: Stand) -> None:
    fail_both(stand)
    stand.now += DAY + 1.0
    assert (view(stand).liveness, broken(stand)) == ("failed", set())


def test_what_fails_after_a_step_is_new(stand: Stand) -> None:
    fail_both(stand)
    first, second = start(stand)
    train(stand, first, 8)
    stand.plane.goodbye(first, "PathFull")
    stand.plane.goodbye(second, "RuntimeError")
    known = view(stand).breakdown
    assert isinstance(known, Breakdown)
    assert (known.error, known.rank, known.step) == ("PathFull", 0, 8)


def test_the_interface_takes_a_name_only_and_audits_it(daemon: Daemon) -> None:
    run = new_run()
    agent = Agent(daemon, run, world_size=1)
    where = f"/v1/agents/{agent.id}"
    refused = daemon.http("DELETE", where, "agent", params={"error": "StateLost: secret"})
    assert refused.status_code == 422, refused.text
    agent.client.goodbye(agent.id, "StateLost")
    shown = daemon.http("GET", f"/v1/runs/{run}").json()
    assert (shown["liveness"], shown["breakdown"]["error"]) == ("failed", "StateLost")
    row = daemon.client().audit(run)[-1]
    assert (row.action, row.reason) == ("failed", "The training ended with StateLost.")
    text = daemon.http("GET", "/metrics").text
    assert f'tidegate_run_broken{{error="StateLost",run="{run}",state="failed"}} 1.0' in text
    daemon.client().delete_run(run)
    assert run not in daemon.http("GET", "/metrics").text


def test_an_agent_of_the_version_before_says_goodbye_without_an_error(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run(), world_size=1)
    assert daemon.http("DELETE", f"/v1/agents/{agent.id}", "agent").status_code == 204
    assert daemon.client().run(agent.message.run).liveness == "finished"
