"""Now: the runs in order, the one thing to do next, and what is said when there is nothing to show."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest

from tests.dashboard import caches
from tests.dashboard.pages.test_alerts import tell
from tests.dashboard.screen import again, page, text
from tests.dashboard.scripted import Agent, Daemon, start_daemon, step_report
from tests.services import until
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.step_stats import summarize, verdict
from tidegate.dashboard.data import read_cache, triage
from tidegate.dashboard.widgets import card
from tidegate.errors import DaemonUnreachable
from tidegate.wire.alert import AlertView
from tidegate.wire.base import Liveness
from tidegate.wire.prediction import Advice
from tidegate.wire.run import Breakdown, RankView, RunView
from tidegate.wire.step import StallRow, StepReport

NOW = 1000.0


def run_of(
    name: str,
    liveness: Liveness = "live",
    step: StepReport | None = None,
    *,
    last_seen: float = NOW,
    started_at: float = 0.0,
    device_memory_bytes: int | None = None,
) -> RunView:
    rank = RankView(
        rank=0, agent=name, host="gpu-1", pid=4711, device_kind="cuda", metrics_address="", liveness=liveness,
        last_seen=last_seen, started_at=0.0, phase="update", step=1, applied_generation=0, effective={},
        last_step=step, device_memory_bytes=device_memory_bytes,
    )  # fmt: skip
    return RunView(
        run=name, liveness=liveness, device_kind="cuda", world_size=1, step=1, generation=0,
        started_at=started_at, last_seen=last_seen, ranks=(rank,),
    )  # fmt: skip


def alert_of(severity: str, knob: str = "stride") -> AlertView:
    return AlertView(
        run="r", fingerprint="1", alert="A", state="firing", severity=severity, summary="r: too slow", knob=knob,
        starts_at=0.0, received_at=0.0,
    )  # fmt: skip


CALM = step_report(1, NOW).model_copy(update={"stalls": ()})
STALLED = step_report(1, NOW)
SHORT = CALM.model_copy(update={"phase_seconds": {**CALM.phase_seconds, "update": 0.1}})
BLOCKED = CALM.model_copy(update={"stalls": (StallRow(phase="update", cause="collective", seconds=1.0),)})


@pytest.mark.parametrize(
    ("run", "alerts", "page_", "words"),
    [
        (
            run_of("r", "lost", last_seen=NOW - 200),
            (),
            "run",
            "Look at process 4711 on gpu-1: rank 0 sent no message for 3 min 20 s.",
        ),
        (run_of("r", "stale", last_seen=NOW - 12), (), "run", "for 12 s."),
        (
            run_of("r", "failed").model_copy(
                update={"breakdown": Breakdown(at=NOW, rank=1, step=1391, error="StateLost")}
            ),
            (alert_of("critical"),),
            "run",
            "Failed after 1\u202f391 steps: StateLost on rank 1. Read its log.",
        ),
        (run_of("r", step=STALLED), (), "tune", "13 % of each step is spent waiting for h2d."),
        (run_of("r", step=STALLED), (alert_of("warning"),), "alerts", "too slow. Turn stride."),
        (run_of("r", step=CALM), (alert_of("info", "none"),), "alerts", "too slow."),
        (run_of("r", step=BLOCKED), (), "timeline", "waiting for collective. See what holds it up."),
        (
            run_of("r", step=CALM, device_memory_bytes=39 * 10**9),
            (),
            "tune",
            "in the backward: lower static_ratio: state",
        ),
    ],
)
def test_what_a_run_wants(run: RunView, alerts: tuple[AlertView, ...], page_: str, words: str) -> None:
    found = triage.task(run, alerts, NOW)
    assert found is not None
    assert (found.page, words in found.sentence) == (page_, True), found


def test_a_calm_or_finished_run_wants_nothing() -> None:
    assert triage.task(run_of("r", step=SHORT), (), NOW) is None
    assert triage.task(run_of("r"), (), NOW) is None
    assert triage.task(run_of("r", "finished", STALLED), (alert_of("critical"),), NOW) is None
    resolved = alert_of("critical").model_copy(update={"state": "resolved"})
    assert triage.task(run_of("r", step=SHORT), (resolved,), NOW) is None


def test_what_goes_on_comes_first_and_the_newest_of_it() -> None:
    made = [("d", "finished", 3.0), ("c", "live", 1.0), ("b", "live", 2.0), ("a", "stale", 5.0), ("e", "lost", 9.0)]
    runs = [run_of(name, liveness, started_at=at) for name, liveness, at in made]  # type: ignore[arg-type]
    assert [run.run for run in triage.ordered(runs)] == ["a", "b", "c", "e", "d"]
    assert triage.counted(runs) == "2 live, 1 finished, 1 stale, 1 lost"
    lost_one = run_of("f", "lost", started_at=7.0)
    lost_one = lost_one.model_copy(update={"ranks": (*lost_one.ranks, *run_of("f").ranks)})
    assert [run.run for run in triage.running([*runs, lost_one])] == ["f", "a", "b", "c"]


def test_who_is_lost_for_days_is_no_task() -> None:
    assert triage.task(run_of("r", "lost"), (), NOW + 60) is not None
    assert triage.task(run_of("r", "failed"), (), NOW + 2 * triage.BROKEN_SECONDS) is None
    assert triage.task(run_of("r", "lost"), (), NOW + 2 * triage.BROKEN_SECONDS) is None


def test_the_worst_task_comes_first() -> None:
    asked = [
        triage.task(run_of("waits", step=STALLED), (), NOW),
        triage.task(run_of("late", "stale"), (), NOW),
        triage.task(run_of("critical", step=CALM), (alert_of("critical"),), NOW),
        triage.task(run_of("warned", step=CALM), (alert_of("warning"),), NOW),
        triage.task(run_of("lost", "lost"), (), NOW),
        triage.task(run_of("blocked", step=BLOCKED), (), NOW),
        triage.task(run_of("large", step=CALM), (), NOW),
    ]
    order = [task.run for task in triage.sorted_tasks([task for task in asked if task])]
    assert order == ["lost", "critical", "warned", "late", "blocked", "waits", "large"]


def test_advice_is_given_where_knobs_help() -> None:
    good = Advice(run="r", changes={"stride": 4.0}, predicted_update_seconds_now=1.4, sentence="stride=4 helps.")
    none = Advice(run="r", predicted_update_seconds_now=1.4, sentence="Nothing helps.")
    unknown = Advice(run="r", sentence="No rates.")

    def told(run: RunView, advice: Advice | None) -> tuple[str, str] | None:
        found = triage.task(run, (), NOW)
        assert found is not None
        found = triage.with_advice(found, advice)
        return (found.page, found.sentence.removesuffix(".")) if found else None

    spent = "13 % of each step is spent waiting for h2d."
    waits, large = run_of("r", step=STALLED), run_of("r", step=CALM)
    assert told(waits, good) == ("tune", f"{spent} stride=4 helps")
    assert told(waits, none) == ("timeline", f"{spent} Nothing helps. See what holds it up")
    assert told(waits, unknown) == ("tune", f"{spent} No rates")
    assert told(waits, None) == ("tune", spent.removesuffix("."))
    assert told(large, good) == ("tune", "The update is 43 % of the step. stride=4 helps")
    assert told(large, none) is told(large, unknown) is told(large, None) is None
    lost = run_of("r", "lost")
    assert told(lost, good) == told(lost, None)
    full = run_of("r", step=CALM, device_memory_bytes=39 * 10**9)
    assert told(full, good) == told(full, None), "what fits comes before what is fast"


def test_cards_say_how_each_run_is_and_link_to_it(daemon: Daemon) -> None:
    Agent(daemon, run="big").train(30)
    Agent(daemon, run="small", device_kind="emulated").train(2)
    done = Agent(daemon, run="done")
    done.train(3)
    done.finish()
    Agent(daemon, run="new").report()
    app = page("now")
    shown = text(app)
    assert "Runs 3 live, 1 finished" in shown
    assert re.search(r"3\.\d\d s/step +step 30 · 1 rank · CUDA · last message", shown)
    assert "of the step; it waited 31% of it for h2d" in shown
    assert "no step yet" in shown
    assert "backward 39 %" in shown
    assert "step 2 · 1 rank · emulated" in shown
    order = [link.proto.label for link in app.get("page_link")]
    cards = [label for label in order if label in ("big", "small", "done", "new")]
    assert cards == ["new", "small", "big"], "the newest first"
    (folded,) = app.expander
    assert (folded.label, list(folded.dataframe[0].value["run"])) == ("Runs that ended", ["done"])
    assert "Finished after 3 steps" in folded.dataframe[0].value["verdict"][0]


def test_while_nothing_goes_on_the_newest_that_ended_are_cards(daemon: Daemon) -> None:
    for number in range(5):
        agent = Agent(daemon, run=f"run-{number}")
        agent.train(2)
        agent.finish()
    app = page("now")
    cards = [link.proto.label for link in app.get("page_link") if link.proto.label.startswith("run-")]
    assert cards == ["run-4", "run-3", "run-2"]
    assert list(app.expander[0].dataframe[0].value["run"]) == ["run-1", "run-0"]


def test_a_run_whose_steps_are_not_kept_any_more_does_not_wait_for_its_first() -> None:
    old = run_of("r", "finished").model_copy(update={"step": 280})
    said = card._figures(old, summarize([]), NOW)
    assert "steps not kept" in said
    assert "no step yet" not in said
    assert verdict(old, summarize([]), NOW) == "Finished after 280 steps; the daemon does not have them any more."


def test_the_one_thing_to_do_is_an_alert_before_a_wait(daemon: Daemon) -> None:
    Agent(daemon, run="waiting").train(3)
    app = page("now")
    assert "Next: waiting" in text(app)
    assert "13 % of each step is spent waiting for h2d." in text(app)
    Agent(daemon).train(3)
    tell(daemon, "TidegatePathSlow", "warning", "")
    shown = text(again(app))
    assert "Next: llama-7b 47% <b>of</b> TidegatePathSlow. Turn tier_split." in shown


def test_what_fires_in_no_run_is_something_to_do(daemon: Daemon) -> None:
    Agent(daemon).report()
    tell(daemon, "TidegateDaemonSlow", "critical", "", run="")
    app = page("now")
    assert "Next: what concerns no run" in text(app)
    assert "TidegateDaemonSlow" in text(app)


def test_one_question_tells_what_fires_in_all_runs(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("llama-7b", "other"):
        Agent(daemon, run=run).train(1)
    tell(daemon, "TidegatePathSlow", "warning", "")
    tell(daemon, "TidegateDaemonSlow", "critical", "", run="")
    monkeypatch.setattr(DaemonClient, "alerts", lambda *_: pytest.fail("asked for one run"))
    found = read_cache.FIRING.get(daemon.url)
    assert found.value is not None
    named = {run: [alert.alert for alert in alerts] for run, alerts in found.value.items()}
    assert named == {"llama-7b": ["TidegatePathSlow"], read_cache.NO_RUN: ["TidegateDaemonSlow"]}
    assert found.problem is None
    caches.expire()
    daemon.stop()
    away = read_cache.FIRING.get(daemon.url)
    assert away.problem
    assert away.value == found.value, "what was known last stays"


def test_what_is_not_known_is_not_said_to_be_nothing(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(*_: object) -> list[AlertView]:
        raise DaemonUnreachable("It does not answer.")

    Agent(daemon).report()
    assert "Nothing to do." in text(page("now"))
    assert "Nothing fires." in text(page("alerts"))
    for kind in ("ALERTS", "FIRING"):
        monkeypatch.setattr(read_cache, kind, read_cache.CachedQuery(unanswered, 5.0))
    shown = text(page("now"))
    assert "Nothing to do is known." in shown
    assert "What fires is not known in full: It does not answer." in shown
    assert "nothing fires" not in shown
    shown = text(page("alerts"))
    assert "Whether anything fires is not known." in shown
    assert "It does not answer." in shown


def test_of_many_runs_some_are_rows_and_a_filter_finds_them(daemon: Daemon) -> None:
    for number in range(27):
        Agent(daemon, run=f"run-{number:02d}").report()
    app = page("now")
    assert len([link for link in app.get("page_link") if link.proto.label.startswith("run-")]) == 24
    assert list(app.dataframe[0].value["run"]) == ["run-02", "run-01", "run-00"]
    app.text_input[0].input("-26")
    again(app)
    assert [link.proto.label for link in app.get("page_link") if link.proto.label.startswith("run-")] == ["run-26"]
    app.text_input[0].input("nobody")
    assert any("No run has a name like that" in caption.value for caption in again(app).caption)


def test_a_click_is_on_the_row_that_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the viewer's click is on its way, the runs are sorted anew."""
    monkeypatch.setattr(card.st, "session_state", {})
    monkeypatch.setattr(card.st, "dataframe", lambda *_, **__: {"selection": {"rows": clicked}})
    gone_to: list[str] = []
    monkeypatch.setattr(card.links, "go_to", lambda _, run: gone_to.append(run))
    clicked: list[int] = []
    card.rows("t", [run_of("a"), run_of("b")], NOW, "")
    clicked.append(1)
    card.rows("t", [run_of("b"), run_of("a")], NOW, "")
    assert gone_to == ["b"]


def test_a_daemon_that_goes_away_leaves_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    with start_daemon(tmp_path) as daemon:
        monkeypatch.setenv("TIDEGATE_DAEMON", daemon.url)
        Agent(daemon).train(5)
        app = page("now")
    shown = text(again(app))
    assert "No daemon answers at" in shown
    assert "What follows is what was last known" in shown
    assert "unknown" in shown
    assert "Next:" not in shown


def test_no_run_yet_tells_the_two_ways_to_get_one(daemon: Daemon) -> None:
    app = page("now")
    assert "no run has registered yet" in text(app)
    assert app.code[0].value == "tidegate demo"
    Agent(daemon).train(1)
    until(lambda: "llama-7b" in [link.proto.label for link in again(app).get("page_link")], "the first card")


def test_agents_that_are_refused_are_named_with_and_without_a_run(daemon: Daemon) -> None:
    httpx.post(f"{daemon.url}/v1/agents", trust_env=False)
    said = "Agents at 127.0.0.1 are refused, because they send no token"
    assert said in text(page("now"))
    Agent(daemon).train(1)
    shown = text(page("now"))
    assert said in shown
    assert "Nothing to do." not in shown


def test_the_start_page_goes_on_to_now_and_an_old_address_to_its_run(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    assert "Runs 1 live" in text(page("start"))
    assert "Phases, step by step" in text(page("start", run="llama-7b"))


def test_no_age_is_negative() -> None:
    ahead = run_of("r", "lost", last_seen=time.time() + 5)
    found = triage.task(ahead, (), time.time())
    assert found is not None
    assert "for 0 s." in found.sentence
