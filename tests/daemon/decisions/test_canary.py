"""Changes on trial: the verdict as tables, what the daemon does with it, and a real run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.daemon.live import Agent, Daemon, hello, new_run, step_report, threaded, wait_until
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.control.preview import preview
from tidegate.daemon.control.run import Clocks
from tidegate.daemon.control.trials import Predicted
from tidegate.daemon.decisions.canary import (
    Canary,
    StepOfAllRanks,
    common_steps,
    compare_steps,
    judge,
    measure,
)
from tidegate.daemon.decisions.step_window import StepFigures
from tidegate.daemon.storage.store import Store
from tidegate.errors import DaemonError, NotFound
from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentReport, Applied, Vote
from tidegate.wire.canary import CanaryRequest
from tidegate.wire.prediction import KnobPreview


def steps(*seconds: float, free: float | None = None) -> tuple[StepOfAllRanks, ...]:
    return tuple(StepOfAllRanks(value, value / 2, value / 2, free) for value in seconds)


def noisy(middle: float, count: int, seed: int) -> tuple[StepOfAllRanks, ...]:
    """5 % noise, and every tenth step takes three times as long, as one with a checkpoint or a slow file."""
    made = random.Random(seed)
    return steps(*(middle * made.gauss(1, 0.05) * (3 if n % 10 == 7 else 1) for n in range(count)))


def trial(before: tuple[StepOfAllRanks, ...], **more: Any) -> Canary:
    return Canary(**{"base": 0, "steps": 20, "min_effect": 0.05, "min_headroom": 0.05, "before": before, **more})


FIRST = steps(9.0)  # moves state
TABLE = [
    ("too few", noisy(1, 20, 1), FIRST + noisy(1, 19, 2), "waiting"),
    ("the same", noisy(1, 20, 1), FIRST + noisy(1, 20, 2), "promoted"),
    ("faster", noisy(1, 20, 1), FIRST + noisy(0.8, 20, 2), "promoted"),
    ("slower", noisy(1, 20, 1), FIRST + noisy(1.2, 20, 2), "condemned"),
    ("slower, but too little to count", noisy(1, 20, 1), FIRST + noisy(1.02, 20, 2), "promoted"),
    ("a few outliers", noisy(1, 20, 1), FIRST + noisy(1, 17, 2) + steps(30, 30, 30), "promoted"),
    ("much slower, seen early", noisy(1, 20, 1), FIRST + noisy(9, 5, 2), "condemned"),
    ("much slower, too early", noisy(1, 20, 1), FIRST + noisy(9, 4, 2), "waiting"),
    ("memory is short", steps(*[1] * 20, free=0.5), steps(9, 1, free=0.01), "condemned"),
    ("memory always was short", steps(*[1] * 20, free=0.02), steps(9, *[1] * 20, free=0.01), "promoted"),
    ("memory is not known", steps(*[1] * 20), steps(9, *[1] * 20, free=0.01), "promoted"),
]


@pytest.mark.parametrize(("name", "before", "after", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_verdicts(
    name: str, before: tuple[StepOfAllRanks, ...], after: tuple[StepOfAllRanks, ...], expected: str
) -> None:
    judged = judge(trial(before), after)
    assert judged.state == expected, judged.verdict
    assert (judged.verdict == "") == (expected == "waiting")
    if expected != "waiting":
        assert judge(judged, after + steps(*[99] * 50)) is judged, "a verdict stays"


def test_a_verdict_tells_measured_against_predicted() -> None:
    judged = judge(trial(steps(*[2] * 20), predicted_before=1.0, predicted_after=0.5), steps(9, *[1] * 20))
    assert judged.verdict == (
        "Helpful: a step (forward, backward and update) took 1 s, 2 s before (-50.0%); exposed 0.5 s, 1 s before "
        "(-25.0% of a step); 20 steps against "
        "20; update 1 s before, 0.5 s after, predicted 1 s and 0.5 s."
    )


def test_what_is_ours_is_seen_through_the_noise_of_the_model() -> None:
    """Forward and backward take anything from nothing to twice the update, as on a machine that is shared."""
    made = random.Random(7)
    before = tuple(StepOfAllRanks(0.1 + made.uniform(0, 0.2), 0.1 * made.gauss(1, 0.05), 0.1) for _ in range(12))
    after = tuple(StepOfAllRanks(0.14 + made.uniform(0, 0.2), 0.14 * made.gauss(1, 0.05), 0.14) for _ in range(13))
    judged = judge(trial(before, steps=12), after)
    assert judged.state == "condemned", judged.verdict
    assert judged.measured is not None
    assert judged.measured.exposed_score > 2.33


def test_chance_condemns_seldom() -> None:
    """Of 300 trials that change nothing, with the least effect that can be asked for."""
    found = [judge(trial(noisy(1, 20, n), min_effect=1e-9), FIRST + noisy(1, 20, n + 1000)) for n in range(300)]
    assert sum(canary.state == "condemned" for canary in found) <= 12


STORED = TypeAdapter(Canary)
SECONDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=30)


@given(SECONDS, st.floats(0.1, 10))
def test_a_canary_is_stored_as_it_is(seconds: list[float], predicted: float) -> None:
    canary = trial(steps(*seconds, free=0.5), predicted_before=predicted)
    measured = measure(canary.before, canary.before, compare_steps(canary.before, canary.before))
    for found in (canary, replace(canary, measured=measured, state="promoted")):
        assert STORED.validate_python(STORED.dump_python(found, mode="json")) == found


def told(step: int, update: float, peak: int = 0, *, skipped: bool = False) -> StepFigures:
    peaks = {"device_memory_peak_bytes": {"update": peak}, "skipped": skipped}
    return StepFigures.of(step_report(step, update).model_copy(update=peaks))


def test_a_step_is_as_slow_as_its_slowest_rank_and_known_when_all_have_told() -> None:
    first = [told(n, 1.0, 10) for n in range(1, 6)]
    second = [told(1, 1.0, 50), told(2, 3.0, 60), told(3, 1.0, 90, skipped=True), told(4, 2.0, 50)]
    found = common_steps([(first, 100), (second, 100)], first=2)
    assert found == [
        StepOfAllRanks(3.1, 3.0, 3.0, pytest.approx(0.4)),
        StepOfAllRanks(2.1, 2.0, 2.0, pytest.approx(0.5)),
    ]
    assert common_steps([(first, None), (second, 100)], first=2)[0].free_share == pytest.approx(0.4)
    assert common_steps([]) == []


# ---- what the daemon does

ASK = CanaryRequest(steps=10)


def on_trial(daemon: Daemon, ranks: int = 1, before: float = 1.0) -> list[Agent]:
    """Agents that run with generation 1, on trial."""
    run = new_run()
    agents = [Agent(daemon, run, rank).begin() for rank in range(ranks)]
    for agent in agents:
        agent.train(12, before)
    made = daemon.client().set_knobs(run, {"stride": 4}, canary=ASK, wait=0, reason="try it")
    assert made.canary is not None
    assert (made.state, made.canary.state, made.canary.base) == ("proposed", "waiting", 0)
    settle(agents)
    return agents


def settle(agents: list[Agent]) -> None:
    """All vote, then all apply."""
    for _ in range(2):
        for agent in agents:
            agent.answer(wait=0)


def test_promoted(daemon: Daemon) -> None:
    (agent,), client = on_trial(daemon), daemon.client()
    run = agent.message.run
    agent.train(10, 0.5)
    assert client.generations(run)[1].canary.state == "waiting"  # type: ignore[union-attr]
    agent.train(1, 0.5)
    wait_until(lambda: client.generations(run)[1].canary.state != "waiting", "the verdict")  # type: ignore[union-attr]
    made = client.generations(run)[1]
    assert made.canary is not None
    assert made.canary.measured is not None
    assert (made.canary.state, made.canary.measured.update_seconds_after) == ("promoted", 0.5)
    row = next(row for row in client.audit(run) if row.action == "promoted")
    assert (row.generation, "Helpful" in row.effect, "not predicted" in row.effect) == (1, True, True)
    agent.train(30, 9.0)
    assert client.knobs(run).generation == 1, "what was promoted stays"


def test_rolled_back_by_all_ranks(daemon: Daemon) -> None:
    agents, client = on_trial(daemon, 2), daemon.client()
    run = agents[0].message.run
    agents[0].train(11, 1.3)
    assert len(client.generations(run)) == 2, "rank 1 has not told yet"
    agents[1].train(11, 1.0)
    wait_until(lambda: len(client.generations(run)) == 3, "the way back")
    made, back = client.generations(run)[1:]
    assert (made.canary.state, back.restores, back.state, back.author) == ("condemned", 0, "proposed", "daemon")  # type: ignore[union-attr]
    assert (
        "Canary of generation 1: Harmful: a step (forward, backward and update) took 1.4 s, 1.1 s before" in back.reason
    )
    settle(agents)
    made, back = client.generations(run)[1:]
    assert (made.canary.state, back.state, back.knobs["stride"]) == ("rolled_back", "applied", 2.0)  # type: ignore[union-attr]
    actions = [row.action for row in client.audit(run)]
    assert actions[-5:] == ["condemned", "proposed", "canary_ended", "committed", "applied"]


def test_a_rollback_after_a_canary_that_went_back_does_not_restore_the_harmful_knobs(daemon: Daemon) -> None:
    (agent,), client = on_trial(daemon), daemon.client()
    run = agent.message.run
    agent.train(11, 3.0)
    wait_until(lambda: len(client.generations(run)) == 3, "the way back")
    settle([agent])
    assert client.generations(run)[1].canary.state == "rolled_back"  # type: ignore[union-attr]
    with pytest.raises(DaemonError, match="has the knobs of generation 0 already"):
        client.roll_back(run, wait=0)
    assert client.roll_back(run, 1, wait=0).restores == 1, "a generation given by number is restored even if harmful"


def test_a_rank_that_does_not_agree_to_go_back_is_asked_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.daemon.control.trials.RETRY_SECONDS", 0.2)
    (agent,), client = on_trial(daemon), daemon.client()
    agent.refuse = "not now"
    agent.train(11, 3.0)
    wait_until(lambda: len(client.generations(agent.message.run)) == 3, "the way back")
    agent.answer()
    assert client.generations(agent.message.run)[2].state == "refused"
    agent.refuse = ""
    wait_until(lambda: agent.answer(wait=0.1) and agent.generation == 3, "the second way back")
    assert client.generations(agent.message.run)[1].canary.state == "rolled_back"  # type: ignore[union-attr]


@pytest.mark.parametrize(("seconds", "newest"), [(4.5, 2), (9, 3), (3_600, 18)])
def test_a_rank_that_always_refuses_is_asked_ever_less_often(tmp_path: Path, seconds: float, newest: int) -> None:
    """By a clock of the test's: at once, after 5 s, then after twice as long each time, up to five minutes."""
    now = [1000.0]
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    plane = ControlPlane(store, clock=Clocks(wall=lambda: now[0], mono=lambda: now[0]))
    message = hello("llama")
    plane.hello(message, Knobs(stride=2.0, static_ratio=0.0))
    run = plane.registry.run("llama")

    def say(generation: int, *numbers: int, seconds: float = 1.0) -> None:
        """Steps, the first ones under `generation`."""
        made = tuple(step_report(n, seconds) for n in numbers)
        plane.report(
            message.agent,
            AgentReport(
                timestamp=now[0], step=max(numbers), phase="update", generation=generation, effective={}, steps=made,
                applied=Applied(generation=generation, step=min(numbers)),
            ),
        )  # fmt: skip

    say(0, *range(1, 13))
    plane.patch(run, Knobs(stride=4.0, static_ratio=0.0), {"stride": 4.0}, "ada", "", (ASK, Predicted()))
    plane.vote(message.agent, Vote(generation=1, can=True))
    say(1, *range(13, 24), seconds=3.0)
    last = 23
    while now[0] < 1000.0 + seconds:
        asked = run.control.pending
        now[0] += 0.5
        plane.tick()
        last += 1
        say(1, last, seconds=3.0)  # it is live
        if asked is not None:
            plane.vote(message.agent, Vote(generation=asked.number, can=False, reason="not now"))
    store.close()
    assert [run.control.committed.number, run.control.newest] == [1, newest]


def test_a_machine_that_stands_still_while_it_judges_delays_the_way_back_by_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    plane = ControlPlane(store, lease_seconds=600.0, clock=Clocks(wall=lambda: now[0], mono=lambda: now[0]))
    message = hello("llama")
    plane.hello(message, Knobs(stride=2.0, static_ratio=0.0))
    run = plane.registry.run("llama")

    def say(generation: int, *numbers: int, seconds: float) -> None:
        made = tuple(step_report(n, seconds) for n in numbers)
        applied = Applied(generation=generation, step=min(numbers))
        report: dict[str, Any] = {
            "timestamp": now[0],
            "step": max(numbers),
            "phase": "update",
            "generation": generation,
        }
        plane.report(message.agent, AgentReport(**report, effective={}, steps=made, applied=applied))

    def slow(canary: Canary, after: list[StepOfAllRanks]) -> Canary:
        now[0] += 60.0
        return judge(canary, after)

    say(0, *range(1, 13), seconds=1.0)
    plane.patch(run, Knobs(stride=4.0, static_ratio=0.0), {"stride": 4.0}, "ada", "", (ASK, Predicted()))
    plane.vote(message.agent, Vote(generation=1, can=True))
    with monkeypatch.context() as patched:
        patched.setattr("tidegate.daemon.control.trials.judge", slow)
        say(1, 13, seconds=3.0)
    say(1, *range(14, 24), seconds=3.0)
    plane.tick()
    assert run.control.committed.canary.state == "condemned"  # type: ignore[union-attr]
    store.close()


def test_at_once_on_request(daemon: Daemon) -> None:
    (agent,), client = on_trial(daemon), daemon.client()
    back = client.roll_back(agent.message.run, reason="it is 3 a.m.", wait=0)
    assert (back.state, back.restores, back.reason) == ("proposed", 0, "it is 3 a.m.")
    settle([agent])
    first, made, back = client.generations(agent.message.run)
    assert (made.canary.state, back.state, back.knobs) == ("rolled_back", "applied", first.knobs)  # type: ignore[union-attr]


def test_a_change_ends_the_trial(daemon: Daemon) -> None:
    (agent,), client = on_trial(daemon), daemon.client()
    run = agent.message.run
    with pytest.raises(DaemonError, match="Generation 1 is still on trial: wait for its verdict"):
        client.set_knobs(run, {"stride": 6}, canary=ASK, wait=0)
    client.set_knobs(run, {"stride": 6}, wait=0)
    settle([agent])
    made, newer = client.generations(run)[1:]
    assert (made.canary.state, newer.state) == ("superseded", "applied")  # type: ignore[union-attr]
    assert "Ended by generation 2" in made.canary.verdict  # type: ignore[union-attr]


def test_nothing_to_compare_with(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run).begin()
    agent.train(4, 1.0)
    with pytest.raises(DaemonError, match="Only 3 steps ran with generation 0, 5 are needed"):
        client.set_knobs(run, {"stride": 6}, canary=ASK)
    agent.client.goodbye(agent.id)
    with pytest.raises(DaemonError, match="No rank is running"):
        client.set_knobs(run, {"stride": 6}, canary=ASK)
    assert client.knobs(run).generation == 0


def test_steps_that_ran_with_other_knobs_are_nothing_to_compare_with(daemon: Daemon) -> None:
    """Generation 1 is committed, the rank has not taken it: what it ran was generation 0."""
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run).begin()
    agent.train(12, 1.0)
    client.set_knobs(run, {"stride": 4}, wait=0)
    agent.vote(1)
    assert client.knobs(run).pending is None
    with pytest.raises(DaemonError, match="Only 0 steps ran with generation 1, 5 are needed"):
        client.set_knobs(run, {"stride": 6}, canary=ASK)
    agent.answer(wait=0)
    agent.train(12, 1.0)
    assert client.set_knobs(run, {"stride": 6}, canary=ASK, wait=0).canary is not None


def test_all_ranks_have_the_knobs_that_are_compared_with(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agents = [Agent(daemon, run, rank) for rank in range(2)]
    agents[0].begin().train(12, 1.0)
    with pytest.raises(DaemonError, match="Only 0 steps ran with generation 0"):
        client.set_knobs(run, {"stride": 6}, canary=ASK)
    agents[1].begin().train(12, 1.0)
    assert client.set_knobs(run, {"stride": 6}, canary=ASK, wait=0).canary is not None


def test_what_commits_during_the_prediction_stays(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change with a canary is predicted off the event loop: meanwhile the rank agrees to somebody's change."""
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run).begin()
    agent.train(12, 1.0)
    client.set_knobs(run, {"static_ratio": 0.5}, wait=0)
    bases: list[float | int | str] = []

    def slow(*given: Any, **more: Any) -> KnobPreview:
        if not bases:
            settle([agent])
            agent.train(12, 1.0)
        seen = preview(*given, **more)
        bases.append(seen.before["static_ratio"])
        return seen

    monkeypatch.setattr("tidegate.daemon.routes.knobs.preview", slow)
    made = client.set_knobs(run, {"stride": 4}, canary=ASK, wait=0)
    assert (made.knobs["stride"], made.knobs["static_ratio"], bases) == (4.0, 0.5, [0.0, 0.5])
    assert made.canary is not None
    assert made.canary.base == 1


def test_back_to_any_generation(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run)
    for stride in (3, 4, 5):
        client.set_knobs(run, {"stride": stride}, wait=0)
        settle([agent])
    agent.refuse = "no"
    client.set_knobs(run, {"stride": 9}, wait=0)
    settle([agent])
    agent.refuse = ""
    for to, expected in ((1, 3.0), (None, 5.0), (0, 2.0)):
        client.roll_back(run, to, wait=0)
        settle([agent])
        assert client.knobs(run).desired["stride"] == expected, to
    with pytest.raises(DaemonError, match="Generation 4 was refused: no rank ever ran with it"):
        client.roll_back(run, 4)
    with pytest.raises(NotFound, match="has no generation 99; the newest is 7"):
        client.roll_back(run, 99)
    with pytest.raises(DaemonError, match="has the knobs of generation 0 already"):
        client.roll_back(run, 0)
    answer = daemon.http("POST", f"/v1/runs/{run}/rollback", headers={"If-Match": '"3"'}, json={"to": 1})
    assert (answer.status_code, answer.json()["type"]) == (412, "stale-knobs")


def test_no_earlier_generation(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    with pytest.raises(DaemonError, match="has no earlier generation"):
        daemon.client().roll_back(agent.message.run)


def test_a_trial_that_never_began_ends_with_the_daemon(tmp_path: Path) -> None:
    with threaded(tmp_path, proposal_seconds=60.0) as daemon:
        agent = Agent(daemon, new_run()).begin()
        agent.train(12, 1.0)
        made = daemon.client().set_knobs(agent.message.run, {"stride": 4}, canary=ASK, wait=0)
        assert made.state == "proposed"
    with threaded(tmp_path) as daemon:
        made = daemon.client().generations(agent.message.run)[1]
        assert made.canary is not None
        assert (made.state, made.canary.state, made.canary.verdict) == ("aborted", "superseded", "It never ran.")


def test_a_trial_outlives_the_daemon(tmp_path: Any) -> None:
    with threaded(tmp_path) as daemon:
        (agent,) = on_trial(daemon)
        agent.train(6, 1.3)
    with threaded(tmp_path) as daemon:
        agent.client = daemon.client("agent")
        agent.client.hello(agent.message)
        agent.say(generation=1)
        agent.say(generation=1)
        agent.train(11, 1.3)
        wait_until(lambda: len(daemon.client().generations(agent.message.run)) == 3, "the way back")
        settle([agent])
        made, back = daemon.client().generations(agent.message.run)[1:]
        assert (made.canary.state, back.restores) == ("rolled_back", 0)  # type: ignore[union-attr]
