"""Tune: turning the knobs, in every state."""

from __future__ import annotations

import time

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.screen import again, field, page, press, text
from tests.dashboard.scripted import Agent, Daemon
from tests.services import until
from tidegate.dashboard.data import knob_edits
from tidegate.dashboard.session.edit_session import EditState
from tidegate.dashboard.widgets import editor
from tidegate.knobs.knobs import specs_for
from tidegate.wire.knobs import GenerationView, KnobBound

BOUNDS = {name: KnobBound.of(spec) for name, spec in specs_for(()).items()}


def tune(daemon: Daemon, token: str = "operate", **query: str) -> AppTest:
    """The page with an operate token."""
    app = page("tune", **query)
    field(app, "Operate token").input(daemon.token(token))
    return again(app)


def knobs_of(app: AppTest) -> list[str]:
    return [e.label for e in [*app.text_input, *app.selectbox] if e.label not in ("Operate token", "Reason")]


def draft(**fields: str) -> knob_edits.Draft:
    return knob_edits.Draft(generation=3, desired={"stride": "auto", "static_ratio": 0.0}, fields=fields)


def test_only_what_was_typed_is_sent_and_bounds_are_the_daemons() -> None:
    assert knob_edits.parse(draft(stride="", static_ratio="  "), BOUNDS).changes == {}
    assert knob_edits.parse(draft(stride=" 3 "), BOUNDS).changes == {"stride": 3.0}
    assert knob_edits.parse(draft(stride="OFF", static_ratio=""), BOUNDS).changes == {"stride": "off"}
    assert knob_edits.parse(draft(stride="auto", static_ratio="0.0"), BOUNDS).changes == {}, "as it is"
    wrong = knob_edits.parse(draft(static_ratio="1.5", stride="2"), BOUNDS)
    assert wrong.changes == {"stride": 2.0}
    assert "0 to 1" in wrong.errors["static_ratio"]


def test_a_conflict_names_the_other_change() -> None:
    other = GenerationView(
        run="r", generation=4, state="applied", knobs={"stride": 3.0, "static_ratio": 0.0}, changes={"stride": 3.0},
        author="ana", reason="fewer crossings", created_at=time.time(),
    )  # fmt: skip
    sentence = knob_edits.conflict(draft(static_ratio="0.25"), (other,))
    assert "ana made generation 4, stride auto → 3 (“fewer crossings”); it is applied" in sentence
    assert "Your edit is kept" in sentence


def test_what_a_late_browser_still_sends_of_emptied_fields_is_no_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    at = EditState()
    monkeypatch.setattr(editor.st, "session_state", {"field": "3", "desk:r": at})
    editor._on_field_change("r", "stride", "field", at.filling)
    editor._on_reason_change("r", "field", at.filling)
    assert (at.edits, at.reason) == ({"stride": "3"}, "3")
    old = at.filling
    at.clear()
    editor._on_field_change("r", "stride", "field", old)
    editor._on_reason_change("r", "field", old)
    assert (at.edits, at.reason) == ({}, "")


def test_a_knob_that_goes_while_it_is_typed_leaves_the_editor_usable(daemon: Daemon) -> None:
    """The run begins again without paths."""
    Agent(daemon, paths=("nvme", "pfs")).train(2)
    app = tune(daemon)
    field(app, "tier_split").input("nvme:2,pfs:1")
    field(app, "static_ratio").input("0.5")
    again(app)
    Agent(daemon).train(1)
    again(app)
    assert "tier_split" not in knobs_of(app)
    assert any("no tier\\_split any more" in said.value for said in app.info)
    assert field(app, "static_ratio").value == "0.5"
    press(app, "Preview")
    assert not app.error


def test_without_a_token_everything_is_there_to_read_and_nothing_to_press(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = page("tune")
    assert field(app, "stride").disabled
    assert all(button.disabled for button in app.button)
    assert [caption.value for caption in app.caption if "Read" in caption.value] == ["Read-only"]
    assert "stride auto 3 (device share 33 %) auto, off or 1 to" in text(app)


@pytest.mark.parametrize("scope", ["read", "agent", "alert"])
def test_a_token_of_another_scope_is_told_and_not_kept(daemon: Daemon, scope: str) -> None:
    Agent(daemon).train(2)
    app = tune(daemon, scope)
    assert "does not accept this operate token" in app.error[0].value
    assert field(app, "stride").disabled


def test_a_token_can_be_given_back(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = tune(daemon)
    assert not field(app, "stride").disabled
    press(app, "Forget it")
    assert field(app, "stride").disabled


def test_a_change_reaches_every_rank(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(2)
    with agent.training(0.05):
        app = tune(daemon)
        field(app, "stride").input("3")
        field(app, "Reason").input("fewer crossings")
        press(app, "Set")
        until(lambda: agent.generation == 1, "the agent to apply generation 1")
    assert agent.knobs["stride"] == 3.0
    assert app.success
    with daemon.operator() as operator:
        assert operator.generations("llama-7b")[-1].reason == "fewer crossings"
    agent.train(6)
    shown = text(again(app))
    assert "Generation 1, stride auto → 3" in shown
    assert "applied on 1 of 1 ranks" in shown
    assert "What the last change did generation 1: stride auto → 3 Measured: update" in shown
    assert (field(app, "stride").value, field(app, "Reason").value) == ("", "")


def test_what_was_typed_outlives_a_visit_to_another_page(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = tune(daemon)
    field(app, "stride").input("3")
    again(app)
    tune_page, app._page_hash = app._page_hash, page("alerts")._page_hash
    assert "Firing" in text(again(app))
    app._page_hash = tune_page
    again(app)
    assert field(app, "stride").value == "3"
    assert not field(app, "stride").disabled, "the token stayed, too"


def test_a_run_without_paths_has_no_fields_for_them(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    assert knobs_of(tune(daemon)) == ["stride", "static_ratio"]
    Agent(daemon, run="tiered", paths=("nvme", "pfs")).train(1)
    app = page("tune", run="tiered")
    assert {"stride", "static_ratio", "tier_split", "host_cache", "order"} <= set(knobs_of(app))


def test_the_knobs_of_storage_paths_are_turned(daemon: Daemon) -> None:
    agent = Agent(daemon, paths=("nvme", "pfs"))
    agent.train(2)
    with agent.training(0.05):
        app = tune(daemon)
        shown = text(app)
        assert "tier_split auto, eq1 or weights of nvme, pfs" in shown
        assert "host_cache auto or 0 to 1024TiB" in shown
        assert field(app, "tier_split").placeholder == "as it is, or nvme:1,pfs:1"
        order = next(box for box in app.selectbox if box.label == "order")
        assert order.options == ["auto", "pinned", "alternate"]
        field(app, "tier_split").input("nvme:2,pfs:1")
        field(app, "host_cache").input("8 GiB")
        order.select("pinned")
        press(app, "Set")
        until(lambda: agent.generation == 1, "the agent to apply generation 1")
    assert app.success
    wanted = {"tier_split": "nvme:2,pfs:1", "host_cache": 8 * 2**30, "order": "pinned"}
    assert {name: agent.knobs[name] for name in wanted} == wanted
    agent.train(1)
    shown = text(again(app))
    assert "host_cache auto → 8GiB, order auto → pinned, tier_split auto → nvme:2,pfs:1" in shown
    field(app, "tier_split").input("nvme:4,pfs:2")
    press(app, "Set")
    assert "Nothing to set" in app.info[0].value, "the ratio is the same"
    field(app, "tier_split").input("ssd:1")
    press(app, "Set")
    assert "the run's paths are: nvme, pfs" in app.error[0].value.replace("\\", "")


def test_a_refusal_keeps_the_edit_and_shows_the_figures(daemon: Daemon) -> None:
    agent = Agent(daemon, refuse="8 residents need 21.3 GB, 14.0 GB are free")
    agent.train(2)
    with agent.training(0.05):
        app = tune(daemon)
        field(app, "static_ratio").input("0.5")
        press(app, "Set")
    assert "21" in app.error[0].value
    assert "The last good knobs stay" in app.error[0].value
    assert field(app, "static_ratio").value == "0.5"
    shown = text(again(app))
    assert "→ refused" in shown
    assert "21.3 GB, 14.0 GB" in shown


def test_a_conflict_names_the_other_change_and_keeps_the_edit(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(2)
    with agent.training(0.05), daemon.operator() as operator:
        app = tune(daemon)
        field(app, "static_ratio").input("0.25")
        operator.set_knobs("llama-7b", {"stride": 4}, reason="mine first")
        press(app, "Set")
        assert "someone else was faster" in app.warning[0].value
        assert "mine first" in app.warning[0].value
        assert field(app, "static_ratio").value == "0.25"
        press(app, "Set")
        assert operator.knobs("llama-7b").desired == {"stride": 4.0, "static_ratio": 0.25}


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("stride", "0.5", "out of range"),
        ("static_ratio", "half", "out of range"),
        ("stride", "auto", "Nothing to set: every field is as the run has it"),
        ("stride", " ", "Nothing to set: no field holds anything"),
    ],
)
def test_what_cannot_be_set_is_told_in_a_sentence(daemon: Daemon, name: str, value: str, sentence: str) -> None:
    Agent(daemon).train(2)
    app = tune(daemon)
    field(app, name).input(value)
    press(app, "Set")
    assert sentence in " ".join(e.value for e in [*app.error, *app.info]).replace("\\", "")
    assert field(app, name).value == value


def test_an_edit_stays_on_the_knobs_that_it_was_begun_on_however_often_the_page_is_drawn(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(2)
    with agent.training(0.05), daemon.operator() as operator:
        app = tune(daemon)
        field(app, "static_ratio").input("0.25")
        again(app)
        operator.set_knobs("llama-7b", {"stride": 4}, reason="mine first")
        assert "Your edit was begun on generation 0; generation 1 has been made since." in text(again(app))
        press(app, "Set")
        assert "someone else was faster" in app.warning[0].value
        assert operator.knobs("llama-7b").desired["static_ratio"] == 0.0
        press(app, "Discard")
        field(app, "static_ratio").input("0.5")
        press(app, "Set")
        assert app.success, "what was begun after the other change stands on it"


def test_a_daemon_that_goes_away_keeps_the_edit_and_what_was_known(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = tune(daemon)
    field(app, "stride").input("3")
    again(app)
    daemon.stop()
    press(app, "Set")
    assert "No daemon answers" in app.error[0].value.replace("\\", "")
    assert field(app, "stride").value == "3"
    assert "What follows is" in text(app)


def test_a_preview_lays_predictions_beside_what_is_measured_and_changes_nothing(daemon: Daemon) -> None:
    Agent(daemon).train(8)
    app = tune(daemon)
    field(app, "stride").input("2")
    press(app, "Preview")
    shown = text(app)
    assert "Preview of stride auto → 2 nothing was changed" in shown
    assert "Predicted update:" in shown
    assert any("Predicted update" in said.value for said in app.info)
    for words in ("measured predicted now predicted then change", "stalled", "host memory", "device memory", "at best"):
        assert words in shown, words
    with daemon.operator() as operator:
        assert operator.knobs("llama-7b").generation == 0
    press(app, "Discard")
    assert "Preview of" not in text(app)
    assert field(app, "stride").value == ""


def test_the_buttons_of_the_editor_do_not_draw_the_whole_page_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamlit empties fields that are edited right after a run of the whole page: it drops what it has not sent of
    them, and the browser then forgets their values."""
    Agent(daemon).train(8)
    app = tune(daemon)
    whole_pages: list[str] = []
    monkeypatch.setattr("streamlit.rerun", lambda scope="app": whole_pages.append(scope))
    for label in ("Preview", "Discard", "Set"):
        field(app, "stride").input("2")
        press(app, label)
    assert whole_pages == []
    with daemon.operator() as operator:
        assert operator.knobs("llama-7b").generation == 1


def test_a_preview_without_rates_says_why_there_are_no_figures(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.dashboard.scripted.RATES", None)
    Agent(daemon).train(2)
    app = tune(daemon)
    field(app, "stride").input("2")
    press(app, "Preview")
    assert "No prediction yet" in text(app)


def test_advice_is_one_press_from_its_preview(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.knobs["stride"] = "off"
    agent.train(8)
    app = tune(daemon)
    assert "Advice what the model would choose stride=" in text(app)
    next(button for button in app.button if button.key == "preview_advice").click()
    again(app)
    assert "Preview of stride" in text(app)
    assert field(app, "stride").value != ""
    with daemon.operator() as operator:
        assert operator.knobs("llama-7b").generation == 0


def test_a_change_on_trial_shows_how_far_it_is_and_its_verdict(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(20)
    with agent.training(0.05):
        app = tune(daemon)
        field(app, "stride").input("3")
        app.checkbox[0].check()
        app.number_input[0].set_value(200)
        press(app, "Set")
        until(lambda: agent.generation == 1, "the agent to apply generation 1")
        before = agent.step
        until(lambda: agent.step > before + 2, "steps of the trial")
        shown = text(again(app))
        assert "on trial" in shown
        assert "of 200 steps" in shown
    with daemon.operator() as operator:
        made = operator.generations("llama-7b")[-1]
    assert made.canary is not None
    assert (made.canary.steps, made.canary.state) == (200, "waiting")


def test_history_leads_back_to_a_generation_that_ran(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(2)
    with agent.training(0.05), daemon.operator() as operator:
        operator.set_knobs("llama-7b", {"stride": 4}, reason="mine first")
        until(lambda: agent.generation == 1, "generation 1")
        app = tune(daemon)
        assert "mine first" in text(app)
        next(box for box in app.selectbox if box.label.startswith("Bring back")).select(0)
        press(app, "Roll back")
        assert "Back to the knobs of generation 0" in app.success[0].value
        until(lambda: agent.knobs["stride"] == "auto", "the way back")
        assert "back to generation 0: stride 4 → auto" in text(again(app))
