"""Tune: the form that turns the knobs, in every state."""

from __future__ import annotations

import pytest

from tests.dashboard.screen import again, field, open_form, page, press, text
from tests.dashboard.scripted import Agent, Daemon, wait_until

LAST_FIELD = "Reason, for the audit log"


def test_without_a_token_the_form_is_there_and_says_why_it_is_off(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = page("tune")
    assert field(app, "stride").disabled
    assert all(button.disabled for button in app.button)
    assert any("operate token" in caption.value for caption in app.caption)


def test_a_change_reaches_every_rank(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(2)
    with agent.training(0.05):
        app = open_form(page("tune"), daemon.token("operate"))
        field(app, "stride").input("3")
        field(app, "Reason").input("fewer crossings")
        press(app, "Set")
        wait_until(lambda: agent.generation == 1, "the agent to apply generation 1")
    assert agent.knobs["stride"] == 3.0
    assert app.success
    with daemon.operator() as operator:
        assert operator.generations("llama-7b")[-1].reason == "fewer crossings"
    agent.train(1)
    shown = text(again(app))
    assert "stride auto → 3" in shown
    assert "applied on 1 of 1 ranks" in shown
    assert field(app, "stride").value == "3"


def test_a_run_without_paths_has_no_fields_for_them(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = open_form(page("tune"), daemon.token("operate"))
    labels = [element.label for element in [*app.text_input, *app.selectbox]]
    assert [label.partition(":")[0] for label in labels] == ["Operate token", "stride", "static_ratio", LAST_FIELD]
    assert not any(word in text(app) for word in ("tier_split", "host_cache", "order, effective"))
    Agent(daemon, run="tiered", paths=("nvme", "pfs")).train(1)
    shown = text(page("tune", run="tiered"))
    assert all(f"{name}, effective" in shown for name in ("tier_split", "host_cache", "order"))


def test_the_knobs_of_storage_paths_are_turned(daemon: Daemon) -> None:
    agent = Agent(daemon, paths=("nvme", "pfs"))
    agent.train(2)
    with agent.training(0.05):
        app = open_form(page("tune"), daemon.token("operate"))
        assert field(app, "tier_split").label == "tier_split: auto, eq1 or weights of nvme, pfs"
        assert field(app, "tier_split").placeholder == "nvme:1,pfs:1"
        assert field(app, "host_cache").label == "host_cache: auto or 0 to 1024TiB"
        (order,) = app.selectbox
        assert (order.label, order.options) == (
            "order: auto, pinned, alternate",
            ["auto", "pinned", "alternate"],
        )
        field(app, "tier_split").input("nvme:2,pfs:1")
        field(app, "host_cache").input("8 GiB")
        order.select("pinned")
        press(app, "Set")
        wait_until(lambda: agent.generation == 1, "the agent to apply generation 1")
    assert app.success
    wanted = {"tier_split": "nvme:2,pfs:1", "host_cache": 8 * 2**30, "order": "pinned"}
    assert {name: agent.knobs[name] for name in wanted} == wanted
    agent.train(1)
    shown = text(again(app))
    assert "host_cache auto → 8GiB, order auto → pinned, tier_split auto → nvme:2,pfs:1" in shown
    assert (field(app, "host_cache").value, app.selectbox[0].value) == ("8GiB", "pinned")
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
        app = open_form(page("tune"), daemon.token("operate"))
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
        app = open_form(page("tune"), daemon.token("operate"))
        field(app, "static_ratio").input("0.25")
        operator.set_knobs("llama-7b", {"stride": 4}, reason="mine first")
        press(app, "Set")
        assert "someone else was faster" in app.warning[0].value
        assert "mine first" in app.warning[0].value
        assert field(app, "static_ratio").value == "0.25"
        assert field(app, "stride").value == "4"
        press(app, "Set")
        assert operator.knobs("llama-7b").desired == {"stride": 4.0, "static_ratio": 0.25}


@pytest.mark.parametrize(
    ("token", "name", "value", "sentence"),
    [
        ("nonsense", "stride", "3", "does not accept this operate token"),
        ("operate", "stride", "0.5", "out of range"),
        ("operate", "static_ratio", "half", "out of range"),
        ("operate", "stride", "auto", "Nothing to set"),
    ],
)
def test_what_cannot_be_set_is_told_in_a_sentence(
    daemon: Daemon, token: str, name: str, value: str, sentence: str
) -> None:
    Agent(daemon).train(2)
    app = open_form(page("tune"), daemon.token("operate") if token == "operate" else token)
    field(app, name).input(value)
    press(app, "Set")
    assert sentence in " ".join(e.value for e in [*app.error, *app.info]).replace("\\", "")
    assert field(app, name).value == value


def test_a_preview_changes_nothing(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = open_form(page("tune"), daemon.token("operate"))
    field(app, "stride").input("2")
    press(app, "Preview")
    assert "Nothing was changed" in app.info[0].value
    with daemon.operator() as operator:
        assert operator.knobs("llama-7b").generation == 0
