"""The page in every state, run by Streamlit's own test harness against the real daemon."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import httpx
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from tests.dashboard.scripted import Agent, Daemon, start_daemon, wait_until
from tidegate import dashboard
from tidegate.dashboard import feed

LAST_FIELD = "Reason, for the audit log"
MAIN = Path(dashboard.__file__).with_name("main.py")


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    feed.forget()
    yield
    feed.forget()


def page(**query: str) -> AppTest:
    app = AppTest.from_file(str(MAIN), default_timeout=20)
    for name, value in query.items():
        app.query_params[name] = value
    return again(app)


def again(app: AppTest) -> AppTest:
    st.cache_data.clear()
    app.run()
    assert not app.exception
    return app


def text(app: AppTest) -> str:
    """All that the page says in its own HTML, without the tags."""
    bodies = " ".join(element.proto.body for element in app.get("html"))
    return unescape(re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", bodies, flags=re.DOTALL)))


def field(app: AppTest, label: str):  # type: ignore[no-untyped-def]
    return next(element for element in app.text_input if element.label.startswith(label))


def press(app: AppTest, label: str) -> AppTest:
    next(button for button in app.button if button.label == label).click()
    return again(app)


def open_form(app: AppTest, token: str) -> AppTest:
    field(app, "Operate token").input(token)
    return again(app)


def test_no_daemon_says_so_and_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TIDEGATE_DAEMON", f"http://127.0.0.1:{probe.getsockname()[1]}")
        app = page()
    assert "No daemon answers at" in text(app)
    assert [code.value for code in app.code] == ["tidegate daemon"]


def test_no_run_yet_tells_the_two_ways_to_get_one(daemon: Daemon) -> None:
    app = page()
    assert "no run has said hello yet" in text(app)
    commands = [code.value for code in app.code]
    assert commands[0] == "tidegate demo"
    assert "tidegate.attach(" in commands[1]
    assert daemon.url in commands[1]


def test_a_live_run_shows_every_family_of_its_screens(daemon: Daemon) -> None:
    Agent(daemon).train(30)
    app = page()
    shown = text(app)
    assert "The update is 42 % of the step; it waits 31 % of its time on h2d" in shown
    for words in (
        "llama-7b live rank 0 of 1 · CUDA · gpu-1 · step 30",
        "pace 3.50 s/step",
        "last step ended",
        "exposed",
        "tokens",
        "loss",
        "gradient norm",
        "0 skipped of 30",
        "CPU time",
        "GPU peak",
        "h2d",
        "while busy",
        "updated by device 500 M params",
        "state on host 14 subgroups",
        "predicted update 1.40 s off by 4 %",
        "predicted 1.40 s, measured 1.47 s, off by 4 % (median of 20 steps)",
        "device share",
        "generation 0 applied, as desired",
    ):
        assert words in shown, words
    titles = ("Last update, by lane", "Stalls by cause", "Lanes", "Memory", "Link", "Loss", "Tokens", "Generations")
    assert all(title in shown for title in titles)
    assert len(app.get("plotly_chart")) == 8
    assert "Emulated" not in shown


def test_a_run_without_a_step_waits_for_it(daemon: Daemon) -> None:
    Agent(daemon).report()
    assert "Waiting for the first step to finish." in text(page())


def test_an_emulated_device_makes_no_claim(daemon: Daemon) -> None:
    Agent(daemon, device_kind="emulated").train(3)
    assert "Emulated device: rates are simulated, no performance claim" in text(page())


def test_showing_a_run_needs_no_more_than_to_read(daemon: Daemon) -> None:
    """The operate token and the agent's are not there for it to find, and it asks the daemon to change nothing."""
    Agent(daemon).train(2)
    for scope in ("operate", "agent"):
        (daemon.state / f"{scope}.token").unlink()
    shown = text(page())
    assert "off by" in shown
    assert "does not accept" not in shown
    assert 'method="PATCH"' not in httpx.get(f"{daemon.url}/metrics", trust_env=False).text


def test_the_prediction_is_of_the_rank_shown_and_may_be_missing(daemon: Daemon) -> None:
    Agent(daemon, world_size=2, predicted=None).train(2)
    other = Agent(daemon, rank=1, world_size=2, predicted=0.8)
    other.report()
    app = page()
    assert "predicted update – no prediction yet" in text(app)
    app.selectbox[0].select(1)
    assert "predicted update 800 ms not measured yet" in text(again(app))
    other.train(1)
    assert "predicted 800 ms, measured 1.52 s, off by 47 %" in text(again(app))


def test_a_finished_run_says_so(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(5)
    agent.finish()
    shown = text(page())
    assert "llama-7b finished" in shown
    assert "Finished after 5 steps: the update was 43 % of the step" in shown


def test_a_silent_run_is_late_then_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    with start_daemon(tmp_path, lease_seconds=0.7) as daemon, daemon.operator() as operator:
        monkeypatch.setenv("TIDEGATE_DAEMON", daemon.url)
        Agent(daemon).train(5)
        wait_until(lambda: operator.run("llama-7b").liveness == "stale", "a stale run")
        assert "Late: no word from rank 0 for" in text(page())
        wait_until(lambda: operator.run("llama-7b").liveness == "lost", "a lost run")
        assert "Lost: no word from rank 0 for" in text(page())


def test_a_daemon_that_goes_away_leaves_the_last_figures_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    with start_daemon(tmp_path) as daemon:
        monkeypatch.setenv("TIDEGATE_DAEMON", daemon.url)
        agent = Agent(daemon)
        agent.train(5)
        app = page()
        daemon.clients.clear()
    again(app)
    assert "No daemon answers at" in text(app)
    assert "this page reconnects by itself" in text(app)
    assert "The update is 43 % of the step" in text(app)
    with start_daemon(tmp_path, port=int(daemon.url.rpartition(":")[2])) as revived:
        revived.clients.append(agent.client)
        agent.train(1)
        again(app)
        assert "No daemon answers" not in text(app)
        assert "step 6" in text(app)


def test_a_token_that_cannot_read_is_told_and_not_traced(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_READ_TOKEN", "wrong")
    assert "does not accept this page's read token" in text(page())


def test_the_run_of_the_address_is_shown_and_an_unknown_one_is_told(daemon: Daemon) -> None:
    Agent(daemon, run="one").train(2)
    Agent(daemon, run="two", world_size=2).train(2)
    Agent(daemon, run="two", rank=1, world_size=2).train(7)
    app = page(run="one")
    assert "one live rank 0 of 1" in text(app)
    app.selectbox[0].select("two")
    again(app)
    assert app.query_params["run"] in ("two", ["two"])
    app.selectbox[1].select(1)
    assert "two live rank 1 of 2 · CUDA · gpu-1 · step 7" in text(again(app))
    assert "The daemon knows no run called three." in text(page(run="three"))


def test_without_a_token_the_form_is_there_and_says_why_it_is_off(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = page()
    assert field(app, "stride").disabled
    assert all(button.disabled for button in app.button)
    assert any("operate token" in caption.value for caption in app.caption)


def test_a_change_reaches_every_rank(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(2)
    with agent.training(0.05):
        app = open_form(page(), daemon.token("operate"))
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
    app = open_form(page(), daemon.token("operate"))
    labels = [element.label for element in [*app.text_input, *app.selectbox]]
    assert [label.partition(":")[0] for label in labels] == ["Operate token", "stride", "static_ratio", LAST_FIELD]
    assert not any(word in text(app) for word in ("tier_split", "host_cache", "order, effective"))


def test_storage_paths_have_a_table_where_there_are_any(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    assert "Storage paths" not in text(page())
    Agent(daemon, run="tiered", paths=("nvme", "pfs")).train(25)
    shown = text(page(run="tiered"))
    assert "Storage paths means of 20 steps" in shown
    row = "2 of 16 4.00 GB 50 %, 4.00 GB/s 4.00 GB 80 %, 4.00 GB/s 1.25 s 2 900 GB 98.7 TB"
    assert f"nvme {row} pfs {row}" in shown
    for words in ("state on nvme 2 subgroups", "tier_split, effective", "host_cache, effective", "order, effective"):
        assert words in shown, words


def test_the_knobs_of_storage_paths_are_turned(daemon: Daemon) -> None:
    agent = Agent(daemon, paths=("nvme", "pfs"))
    agent.train(2)
    with agent.training(0.05):
        app = open_form(page(), daemon.token("operate"))
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
        app = open_form(page(), daemon.token("operate"))
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
        app = open_form(page(), daemon.token("operate"))
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
    app = open_form(page(), daemon.token("operate") if token == "operate" else token)
    field(app, name).input(value)
    press(app, "Set")
    assert sentence in " ".join(e.value for e in [*app.error, *app.info]).replace("\\", "")
    assert field(app, name).value == value


def test_a_preview_changes_nothing(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    app = open_form(page(), daemon.token("operate"))
    field(app, "stride").input("2")
    press(app, "Preview")
    assert "Nothing was changed" in app.info[0].value
    with daemon.operator() as operator:
        assert operator.knobs("llama-7b").generation == 0


def test_a_held_update_stays_on_the_screen(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(3)
    app = page()
    app.toggle[0].set_value(True)
    assert "by lane step 3," in text(again(app))
    agent.train(1)
    assert "by lane step 3," in text(again(app))
    app.toggle[0].set_value(False)
    assert "by lane step 4," in text(again(app))
