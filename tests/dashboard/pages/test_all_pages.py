"""The pages in every state, run by Streamlit's own test harness against the real daemon."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import httpx
import pytest
from cachetools import LRUCache
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue

from tests.dashboard import caches
from tests.dashboard.screen import again, page, text
from tests.dashboard.scripted import Agent, Daemon, start_daemon, step_report, timeline
from tests.services import until
from tidegate.dashboard.data import queries, read_cache
from tidegate.dashboard.pages.registry import SCREENS
from tidegate.wire.agent import AgentReport


def test_no_daemon_says_so_and_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TIDEGATE_DAEMON", f"http://127.0.0.1:{probe.getsockname()[1]}")
        app = page()
    assert "No daemon answers at" in text(app)
    assert [code.value for code in app.code] == ["tidegate daemon"]


def test_no_run_yet_tells_the_two_ways_to_get_one(daemon: Daemon) -> None:
    app = page()
    assert "no run has registered yet" in text(app)
    commands = [code.value for code in app.code]
    assert commands[0] == "tidegate demo"
    assert "tidegate.attach(" in commands[1]
    assert daemon.url in commands[1]


def test_a_live_run_shows_every_family_of_its_screens(daemon: Daemon) -> None:
    Agent(daemon).train(30)
    app = page()
    shown = text(app)
    assert "of the step; it waited 31% of it for h2d" in shown
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
        "generation 0 applied, as desired",
    ):
        assert words in shown, words
    titles = ("Stalls by cause", "Memory", "Link", "Loss", "Tokens")
    assert all(title in shown for title in titles)
    assert len(app.get("plotly_chart")) == 8
    assert "Emulated" not in shown


def test_a_section_that_streamlit_drops_moves_no_other(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit drops unsent messages of a fragment that runs again, and the browser then removes the fragment: it must
    be the only child of its parent, or messages that follow are for wrong elements, and the page stops for good."""
    Agent(daemon).train(30)
    sent: list[ForwardMsg] = []
    monkeypatch.setattr(ForwardMsgQueue, "_before_enqueue_msg", sent.append)
    for screen in SCREENS:
        sent.clear()
        page(screen.path, run="llama-7b")
        parts = [(tuple(m.metadata.delta_path), m.delta.fragment_id) for m in sent if m.HasField("delta")]
        roots = {
            fragment: min((at for at, of in parts if of == fragment), key=len) for _, fragment in parts if fragment
        }
        assert roots, screen.path
        for root in roots.values():
            beside = {at for at, _ in parts if len(at) >= len(root) and at[: len(root) - 1] == root[:-1]}
            assert {at[: len(root)] for at in beside} == {root}, screen.path


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
    assert re.search(r"Finished after 5 steps: the update took \d\.\d+ s, 43% of the step", shown)


def test_a_silent_run_is_late_then_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    with start_daemon(tmp_path, lease_seconds=1.0) as daemon, daemon.operator() as operator:
        monkeypatch.setenv("TIDEGATE_DAEMON", daemon.url)
        agent = Agent(daemon)
        agent.train(5)

        def is_shown_late() -> bool:
            """On a busy machine it may be lost before the page is drawn: then once more."""
            agent.report()
            until(lambda: operator.run("llama-7b").liveness == "stale", "a stale run")
            return "Late: no message from rank 0 for" in text(page())

        until(is_shown_late, "a late run on the page", 60)
        until(lambda: operator.run("llama-7b").liveness == "lost", "a lost run")
        assert "Lost: no message from rank 0 for" in text(page())


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
    assert re.search(r"The update took \d\.\d+ s, 43% of the step", text(app))
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


def test_storage_paths_have_a_table_where_there_are_any(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    assert "Storage paths" not in text(page())
    Agent(daemon, run="tiered", paths=("nvme", "pfs")).train(25)
    shown = text(page(run="tiered"))
    assert "Storage paths means of 20 steps" in shown
    row = "2 of 16 4.00 GB 50 %, 4.00 GB/s 4.00 GB 80 %, 4.00 GB/s 1.25 s 2 900 GB 98.7 TB"
    assert f"nvme {row} pfs {row}" in shown
    for words in ("state on nvme 2 subgroups", "state on pfs 2 subgroups"):
        assert words in shown, words


def test_an_update_is_held_and_another_step_is_chosen(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(3)
    app = page("timeline")
    assert "Update, by lane step 3, 1.15 s measured (above), 881 ms predicted" in text(app)
    app.button[0].click()
    again(app)
    agent.train(1)
    assert app.query_params["step"] in ("3", ["3"])
    assert "by lane step 3," in text(again(app))
    assert app.selectbox[0].options == ["newest step", "step 4", "step 3"]
    app.button[0].click()
    again(app)
    assert "by lane step 4," in text(again(app))
    app.selectbox[0].select("3")
    again(app)
    assert "by lane step 3," in text(again(app))


def test_a_step_that_is_gone_is_told(daemon: Daemon) -> None:
    Agent(daemon).train(3)
    assert "The timeline of step 2 is not kept any more" in text(page("timeline", step="2"))


def test_a_run_that_begins_again_shows_no_timeline_of_before(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    before = timeline(3)
    after = before.model_copy(update={"origin": before.origin + 500})
    Agent(daemon, step=3).report(timeline=before)
    page("timeline")
    assert queries.timeline(daemon.url, "llama-7b", 0, 3) == before
    Agent(daemon, step=3).report(timeline=after)
    caches.expire()
    monkeypatch.setattr(
        queries, "_TIMELINES", read_cache.CachedQuery(lambda *_: None, 1.0)
    )  # the newest is not on a screen yet
    assert queries.snapshot_reading(daemon.url, "llama-7b", 0).value
    assert queries.timeline(daemon.url, "llama-7b", 0, 3) == after


def test_of_timelines_the_ones_looked_at_last_are_kept(monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> None:
    monkeypatch.setattr(queries, "_timelines", LRUCache(2))
    agent = Agent(daemon)
    for step in (1, 2, 1, 3):
        if step > agent.step:
            agent.train()
        assert queries.timeline(daemon.url, "llama-7b", 0, step) is not None
    assert [key[-1] for key in queries._timelines] == [1, 3]


def test_a_timeline_without_rates_has_no_prediction(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.client.report(agent.id, AgentReport(timestamp=time.time(), step=1, phase="forward", generation=0,
                                              effective={}, timeline=timeline(1)))  # fmt: skip
    app = page("timeline")
    assert any("No prediction of this step" in caption.value for caption in app.caption)
    assert "step 1, 1.15 s measured" in text(app)


def test_before_the_first_update_the_timeline_says_so(daemon: Daemon) -> None:
    Agent(daemon).report()
    app = page("timeline")
    assert "No update has been measured yet" in app.get("plotly_chart")[0].proto.spec
    assert not app.exception


def test_of_a_run_that_ended_no_update_is_waited_for(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.step = 1
    agent.report(steps=(step_report(1, time.time()),))
    agent.finish()
    app = page("timeline")
    assert "not kept any more" in app.get("plotly_chart")[0].proto.spec
    assert "after 1 h" in text(app)


@pytest.mark.parametrize("path", ["now", "run", "timeline"])
def test_an_error_in_a_part_is_a_sentence_and_not_a_trace(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    Agent(daemon).train(2)
    monkeypatch.setattr("tidegate.dashboard.style.markup.verdict", lambda _: 1 / 0)
    app = page(path)
    assert "could not be drawn (ZeroDivisionError)" in text(app)
    assert not app.exception
