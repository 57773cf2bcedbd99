"""PATCH of the knobs over HTTP: preconditions, votes, and what becomes of a generation."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.live import ROOT, Agent, Daemon, environment, hello, new_run, threaded, wait_until
from tidegate.daemon.control.preview import prediction_inputs
from tidegate.errors import KnobError, NotFound, StaleKnobs
from tidegate.wire.agent import Applied, Rates, Vote
from tidegate.wire.evidence import SubgroupSizes
from tidegate.wire.knobs import GenerationView


def patch(daemon: Daemon, run: str, match: str | None, body: dict[str, Any] | None = None, query: str = "") -> Any:
    headers = {} if match is None else {"If-Match": match}
    body = {"changes": {"stride": 3}} if body is None else body
    return daemon.http("PATCH", f"/v1/runs/{run}/knobs{query}", headers=headers, json=body)


@pytest.fixture
def idle(daemon: Daemon) -> str:
    """A run whose only rank has finished: changes need no vote."""
    run = new_run()
    agent = Agent(daemon, run)
    agent.client.goodbye(agent.id)
    return run


def test_etag_is_the_newest_generation(daemon: Daemon, idle: str) -> None:
    assert daemon.http("GET", f"/v1/runs/{idle}/knobs").headers["etag"] == '"0"'
    assert patch(daemon, idle, '"0"').headers["etag"] == '"1"'
    assert daemon.http("GET", f"/v1/runs/{idle}/knobs").headers["etag"] == '"1"'


@pytest.mark.parametrize(
    ("match", "status", "type"),
    [
        (None, 428, "if-match-required"),
        ('"1"', 412, "stale-knobs"),
        ('"00"', 412, "stale-knobs"),
        ('W/"0"', 412, "stale-knobs"),
        ("nonsense", 412, "stale-knobs"),
        ('"7", "0"', 200, None),
        ("0", 200, None),
        ("*", 200, None),
    ],
)
def test_if_match(daemon: Daemon, idle: str, match: str | None, status: int, type: str | None) -> None:
    answer = patch(daemon, idle, match)
    assert (answer.status_code, answer.json().get("type")) == (status, type)
    assert daemon.client().knobs(idle).generation == (1 if status == 200 else 0)


def test_412_says_who_changed_what(daemon: Daemon, idle: str) -> None:
    client = daemon.client()
    client.set_knobs(idle, {"stride": 4}, generation=0)
    with pytest.raises(StaleKnobs, match=r"at generation 1, not \"0\": .*@.* \(operate\) changed stride=4 at"):
        client.set_knobs(idle, {"stride": 5}, generation=0)


@pytest.mark.parametrize(
    ("changes", "knob", "said"),
    [
        ({"pace": 1}, "pace", "The knobs are: stride, static_ratio"),
        ({"stride": 0.5}, "stride", "stride=0.5 is out of range: a number from 1"),
        ({"stride": "fast"}, "stride", "'auto' or 'off'"),
        ({"static_ratio": 1.5}, "static_ratio", "a number from 0 to 1"),
        ({"static_ratio": "auto"}, "static_ratio", "a number from 0 to 1"),
    ],
)
@pytest.mark.parametrize("query", ["", "?dry_run=true"])
def test_422_names_knob_value_and_bound(
    daemon: Daemon, idle: str, changes: dict[str, Any], knob: str, said: str, query: str
) -> None:
    answer = patch(daemon, idle, '"0"', {"changes": changes}, query)
    assert (answer.status_code, answer.json()["type"], answer.json()["knob"]) == (422, "invalid-knob", knob)
    assert said in answer.json()["detail"]
    with pytest.raises(KnobError, match="stride" if knob == "pace" else knob):
        daemon.client().set_knobs(idle, changes)


@pytest.mark.parametrize("body", [{}, {"changes": {}}, {"changes": {"stride": None}}, {"changes": {}, "path": "/x"}])
def test_bodies_that_are_no_patch(daemon: Daemon, idle: str, body: dict[str, Any]) -> None:
    assert patch(daemon, idle, '"0"', body).json()["type"] == "invalid-message"


def test_not_a_number_is_no_knob(daemon: Daemon, idle: str) -> None:
    path, content = f"/v1/runs/{idle}/knobs", b'{"changes": {"stride": NaN}}'
    answer = daemon.http("PATCH", path, headers={"If-Match": "*", "Content-Type": "application/json"}, content=content)
    assert answer.status_code == 422


def test_no_such_run(daemon: Daemon) -> None:
    with pytest.raises(NotFound, match="There is no run 'nowhere'"):
        daemon.client().set_knobs("nowhere", {"stride": 3}, generation=0)


def test_without_ranks_it_is_committed_at_once(daemon: Daemon, idle: str) -> None:
    made = daemon.client().set_knobs(idle, {"stride": "OFF"}, reason="quiet night")
    assert (made.state, made.knobs, made.reason) == ("committed", {"stride": "off", "static_ratio": 0.0}, "quiet night")
    assert "when the run starts again" in made.outcome


def test_all_ranks_vote_then_apply(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    first, second = Agent(daemon, run, 0), Agent(daemon, run, 1)
    assert patch(daemon, run, '"0"').status_code == 202
    assert client.knobs(run).pending is not None
    assert first.answer().proposed == 1
    assert first.client.directive(first.id, 0, None, 0.0).proposed is None, "it is not asked twice"
    assert client.generations(run)[1].state == "proposed"
    second.answer()
    assert client.generations(run)[1].state == "committed"
    for agent in (first, second):
        directive = agent.answer()
        assert (directive.committed, directive.committed_knobs["stride"]) == (1, 3.0)
    made = client.generations(run)[1]
    assert (made.state, made.applied) == ("applied", {0: 1, 1: 1})
    view = client.knobs(run)
    assert [rank.applied_generation for rank in view.ranks] == [1, 1]
    assert (view.desired["stride"], view.pending) == (3.0, None)


def test_waiting_for_the_outcome(daemon: Daemon) -> None:
    run = new_run()
    with Agent(daemon, run).answering():
        made = daemon.client().set_knobs(run, {"static_ratio": 0.25})
        assert (made.state, made.outcome) == ("committed", "The rank said yes.")
        wait_until(lambda: daemon.client().generations(run)[1].state == "applied", "applied")


def test_one_rank_refuses(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    willing, unwilling = Agent(daemon, run, 0), Agent(daemon, run, 1)
    unwilling.refuse = "the state needs 9.0 GB, 4.0 GB are free"
    with willing.answering(), unwilling.answering():
        made = client.set_knobs(run, {"static_ratio": 1.0})
    assert made.state == "refused"
    assert made.outcome == "Rank 1 refused: the state needs 9.0 GB, 4.0 GB are free"
    view = client.knobs(run)
    assert [rank.refused for rank in view.ranks] == [None, unwilling.refuse]
    assert (view.desired["static_ratio"], view.generation) == (0.0, 1)
    assert client.runs()[0].generation == 0


def test_silence_aborts_and_names_the_rank(tmp_path: Path) -> None:
    with threaded(tmp_path, proposal_seconds=2.0) as daemon:
        run = new_run()
        Agent(daemon, run, 1)
        with Agent(daemon, run, 0).answering():
            made = daemon.client().set_knobs(run, {"stride": 3})
    assert (made.state, made.outcome) == ("aborted", "No answer from rank 1 before the deadline: nothing was changed.")


@pytest.mark.parametrize(("reason", "committed"), [("", 1), ("too little memory", 0)])
def test_the_answer_to_a_vote_is_the_decision(daemon: Daemon, reason: str, committed: int) -> None:
    run, client = new_run(), daemon.client()
    first, second = Agent(daemon, run, 0), Agent(daemon, run, 1)
    client.set_knobs(run, {"stride": 3}, wait=0)
    vote = Vote(generation=1, can=True)
    at_once = first.client.vote(first.id, vote)
    assert (at_once.committed, at_once.proposed) == (0, None), "it is asked no more, and nothing is decided"
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(first.client.vote, first.id, vote, 30.0)
        with pytest.raises(TimeoutError):
            answer.result(0.3)
        second.vote(1, reason)
        decided = answer.result(20)
    assert (decided.committed, decided.proposed) == (committed, None)
    assert decided.committed_knobs["stride"] == (2.0 if reason else 3.0)


def test_a_newer_change_supersedes(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run)
    assert client.set_knobs(run, {"stride": 3}, wait=0).state == "proposed"
    with pytest.raises(StaleKnobs, match=r"\(proposed\)"):
        client.set_knobs(run, {"stride": 4}, generation=0)
    assert client.set_knobs(run, {"static_ratio": 0.5}, generation=1, wait=0).state == "proposed"
    agent.vote(1)
    directive = agent.answer()
    assert directive.proposed_knobs == {"stride": 2.0, "static_ratio": 0.5}, "on top of what is committed"
    assert [g.state for g in client.generations(run)] == ["committed", "superseded", "committed"]


def test_a_change_that_is_superseded_tells_who_waited(daemon: Daemon) -> None:
    run, answers = new_run(), list[GenerationView]()
    agent = Agent(daemon, run)
    client = daemon.client()
    waiting = threading.Thread(target=lambda: answers.append(client.set_knobs(run, {"stride": 3}, generation=0)))
    waiting.start()
    wait_until(lambda: agent.client.directive(agent.id, 0, None, 0).proposed == 1, "the first proposal")
    daemon.client().set_knobs(run, {"stride": 4}, generation=1, wait=0)
    waiting.join(10)
    assert answers[0].state == "superseded"
    assert "Superseded by generation 2" in answers[0].outcome


def test_of_32_at_once_one_wins_each_generation(daemon: Daemon, idle: str) -> None:
    client = daemon.client()

    def change(number: int) -> int | None:
        try:
            return client.set_knobs(idle, {"stride": number + 1}, generation=number // 32).generation
        except StaleKnobs:
            return None

    with ThreadPoolExecutor(32) as pool:
        for round in range(3):
            won = [made for made in pool.map(change, range(32 * round, 32 * round + 32)) if made is not None]
            assert won == [round + 1]
    assert [made.generation for made in client.generations(idle)] == [0, 1, 2, 3]


def test_the_audit_log_tells_it_all(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run)
    with agent.answering():
        client.set_knobs(run, {"stride": 3}, reason="update stalls on h2d")
        wait_until(lambda: client.generations(run)[1].state == "applied", "applied")
    agent.client.goodbye(agent.id)
    rows = client.audit(run)
    assert [row.action for row in rows] == ["proposed", "committed", "applied", "goodbye"]
    assert rows[0].actor.endswith("(operate)")
    assert (rows[0].before["stride"], rows[0].after["stride"]) == (2.0, 3.0)
    assert (rows[0].reason, rows[2].effect) == ("update stalls on h2d", "first step with it: rank 0 step 1")


def test_measured_effect(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run)
    agent.train(30, update_seconds=2.0)
    client.set_knobs(run, {"stride": 3}, wait=0)
    agent.answer()
    agent.answer()
    agent.train(4, update_seconds=0.5)
    assert client.generations(run)[1].measured_effect is None
    agent.train(1, update_seconds=0.5)
    effect = client.generations(run)[1].measured_effect
    assert effect is not None
    assert (effect.steps_before, effect.steps_after) == (20, 5)
    assert (effect.update_seconds_before, effect.update_seconds_after) == (2.0, 0.5)
    agent.train(40, update_seconds=1.0)
    effect = client.generations(run)[1].measured_effect
    assert effect is not None
    assert (effect.steps_after, effect.update_seconds_after) == (20, 1.0)
    assert [row.action for row in client.audit(run)][-1] == "effect"


SIZES = (SubgroupSizes(numel=1_000_000, count=16, weight_bytes=4, grad_bytes=4, state_bytes=8),)
RATES = Rates(
    h2d_bytes_per_second=1e9,
    d2h_bytes_per_second=1e9,
    cpu_params_per_second=1e8,
    device_params_per_second=1e9,
    norm_params_per_second=1e10,
)


def test_dry_run_changes_nothing_and_predicts(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, 0, subgroups=SIZES, knobs={"stride": "off"})
    before = client.preview_knobs(run, {"stride": 2, "static_ratio": 0.0})
    assert (before.changed, before.predicted_update_seconds_after) == ({"stride": 2.0}, None)
    agent.say(rates=RATES, effective={"stride": "off", "static_ratio": 0.0})
    seen = client.preview_knobs(run, {"stride": 2}, 0)
    assert seen.predicted_update_seconds_before is not None
    assert seen.predicted_update_seconds_after is not None
    assert 0 < seen.predicted_update_seconds_after < seen.predicted_update_seconds_before
    auto = client.preview_knobs(run, {"stride": "auto"}, 0)
    assert auto.predicted_update_seconds_after is None
    assert auto.no_prediction == "No prediction: the ranks choose stride after the change. A value can be predicted."
    assert client.knobs(run).generation == 0
    with pytest.raises(StaleKnobs):
        client.preview_knobs(run, {"stride": 2}, 5)


def test_many_subgroups_are_not_counted_out_on_the_event_loop(daemon: Daemon) -> None:
    """What asks for a prediction only refers to them; the thread that predicts makes each."""
    run = new_run()
    agent = Agent(daemon, run, 0, subgroups=SIZES, knobs={"stride": "off"})
    agent.say(rates=RATES)
    known = prediction_inputs(daemon.app.state.plane.registry.run(run))
    assert known is not None
    assert "predictor" not in vars(known)
    assert [subgroup.id for subgroup in known.predictor.rank.subgroups] == list(range(16))


def test_a_rate_that_is_missing_is_no_error(daemon: Daemon) -> None:
    run = new_run()
    agent = Agent(daemon, run, 0, subgroups=SIZES)
    agent.say(rates=RATES.model_copy(update={"device_params_per_second": None}))
    assert daemon.client().preview_knobs(run, {"stride": 2}).predicted_update_seconds_after is None


def test_reset_knobs(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    first = Agent(daemon, run)
    first.client.goodbye(first.id)
    client.set_knobs(run, {"stride": 7})
    second = Agent(daemon, run, knobs={"stride": 4.0})
    assert client.knobs(run).desired["stride"] == 7.0, "what was desired persists"
    second.client.goodbye(second.id)
    third = Agent(daemon, run, knobs={"stride": 4.0}, reset_knobs=True)
    assert third.generation == 2
    assert client.knobs(run).desired == {"stride": 4.0, "static_ratio": 0.0}
    assert "reset" in [row.action for row in client.audit(run)]
    client.set_knobs(run, {"stride": 9}, wait=0)
    third.answer()
    third.client.hello(third.message)
    assert client.knobs(run).desired["stride"] == 9.0, "the same agent does not reset twice"


def test_reset_by_all_ranks_is_one_generation(daemon: Daemon) -> None:
    run = new_run()
    Agent(daemon, run, 0, knobs={"stride": 2.0})
    for rank in (1, 2, 3):
        Agent(daemon, run, rank, knobs={"stride": 5.0}, reset_knobs=True)
    assert daemon.client().knobs(run).generation == 1


def test_start_up_settings_are_checked(daemon: Daemon) -> None:
    with pytest.raises(KnobError, match="stride"):
        daemon.client("agent").hello(hello(new_run(), knobs={"stride": 0.1}))


def test_the_example_in_the_docs_changes_knobs(daemon: Daemon) -> None:
    text = (ROOT / "docs" / "control.md").read_text()
    (script,) = (part for part in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "PATCH" in part)
    run = new_run()
    with Agent(daemon, run).begin().answering() as agent:
        agent.train(30, 1.0)
        script = script.replace("http://127.0.0.1:8790", daemon.url).replace("run=llama ", f"run={run} ")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=False, timeout=60,
            env=environment(daemon.state),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
    assert (made["state"], made["changes"]) == ("committed", {"stride": 3.0, "static_ratio": 0.25})
    assert made["canary"]["steps"] == 20


def test_why_a_rank_has_not_what_is_committed_is_shown(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    rank = Agent(daemon, run)
    client.set_knobs(run, {"stride": 3}, wait=0)
    rank.vote(1)
    wait_until(lambda: client.generations(run)[1].state == "committed", "committed")
    rank.vote(1, "stride 3 cannot be used here")
    view = client.knobs(run)
    assert [told.refused for told in view.ranks] == ["stride 3 cannot be used here"]
    assert (client.generations(run)[1].state, view.pending) == ("committed", None)
    rank.say(applied=Applied(generation=1, step=1))
    assert client.generations(run)[1].applied == {0: 1}
