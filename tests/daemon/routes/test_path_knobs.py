"""The knobs of storage paths over HTTP: only where a run has paths, and only those that it has."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.live import Agent, Daemon, hello, new_run, step_report, threaded
from tests.daemon.routes.test_knobs import RATES, SIZES
from tidegate.errors import KnobError
from tidegate.tuner.tuner import MINIMUM_GAIN
from tidegate.wire.evidence import ModelEvidence
from tidegate.wire.prediction import Advice, KnobPreview
from tidegate.wire.step import PathRow, PathState

GIB = 2**30
PATHS = ("nvme", "pfs")
WAYS = (("read", "write"), ("write", "read"))
WANTED: dict[str, Any] = {"tier_split": "pfs:1,nvme:2", "host_cache": "8GiB", "order": "pinned"}
GOT = {"tier_split": "nvme:2,pfs:1", "host_cache": 8 * GIB, "order": "pinned"}


def idle(daemon: Daemon, **more: Any) -> str:
    """A run whose only rank has finished: changes need no vote."""
    run = new_run()
    agent = Agent(daemon, run, **more)
    agent.client.goodbye(agent.id)
    return run


def test_they_are_set_and_shown_in_full(daemon: Daemon) -> None:
    run, client = idle(daemon, paths=PATHS), daemon.client()
    view = client.knobs(run)
    assert view.desired == {
        "stride": 2.0, "static_ratio": 0.0, "tier_split": "auto", "host_cache": "auto", "order": "auto",
    }  # fmt: skip
    assert (view.bounds["tier_split"].kind, view.bounds["tier_split"].paths) == ("weights", PATHS)
    assert view.bounds["order"].words == ("auto", "pinned", "alternate")
    made = client.set_knobs(run, WANTED)
    assert (made.changes, made.knobs) == (GOT, {"stride": 2.0, "static_ratio": 0.0, **GOT})
    assert client.knobs(run).desired == made.knobs
    assert client.set_knobs(run, {"tier_split": "auto"}).knobs["tier_split"] == "auto"
    assert client.run(run).paths == PATHS


def test_agents_get_them(daemon: Daemon) -> None:
    run = new_run()
    agent = Agent(daemon, run, paths=PATHS)
    daemon.client().set_knobs(run, WANTED, wait=0)
    asked = agent.answer()
    assert asked.proposed_knobs == {"stride": 2.0, "static_ratio": 0.0, **GOT}
    assert agent.answer().committed_knobs == asked.proposed_knobs


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("query", ["", "?dry_run=true"])
def test_a_run_without_paths_has_none_of_them(daemon: Daemon, name: str, query: str) -> None:
    run = idle(daemon)
    for value in (WANTED[name], "auto"):
        answer = daemon.http(
            "PATCH", f"/v1/runs/{run}/knobs{query}", headers={"If-Match": "*"}, json={"changes": {name: value}}
        )
        told = answer.json()
        assert (answer.status_code, told["type"], told["knob"]) == (422, "invalid-knob", name)
        assert "this run has no storage paths; start it with Offload(paths=…)" in told["detail"]
        assert told["knobs"] == ["stride", "static_ratio"]
    view = daemon.client().knobs(run)
    assert list(view.bounds) == list(view.desired) == ["stride", "static_ratio"]
    assert daemon.client().run(run).paths == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tier_split": "nvme:1,ssd:1"}, "tier_split='nvme:1,ssd:1' names 'ssd'; the run's paths are: nvme, pfs."),
        ({"tier_split": "nvme:0"}, "no weight above 0"),
        ({"host_cache": "lots"}, "host_cache='lots' is out of range: bytes from 0"),
        ({"order": "random"}, "order='random' is out of range: 'auto' or 'pinned' or 'alternate'."),
    ],
)
def test_what_the_run_cannot_have_is_refused(daemon: Daemon, changes: dict[str, Any], said: str) -> None:
    run = idle(daemon, paths=PATHS)
    with pytest.raises(KnobError) as error:
        daemon.client().set_knobs(run, changes)
    assert said in str(error.value)
    assert daemon.client().knobs(run).generation == 0


EFFECTIVE = {"stride": 2.0, "static_ratio": 0.0, "tier_split": "nvme:10,pfs:6", "host_cache": 32_000_000,
             "order": "pinned"}  # fmt: skip
STORED = RATES.model_copy(update={
    "paths": {
        "nvme": {"read_bytes_per_second": 4e8, "write_bytes_per_second": 2e8},
        "pfs": {"read_bytes_per_second": 1e8, "write_bytes_per_second": 1e8},
    },
    "keeps": {f"{path}:{one}": {f"{path}:{other}": 0.5} for path in PATHS for one, other in WAYS},
})  # fmt: skip


def test_a_preview_compares_ratios_and_needs_rates(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES, knobs={"tier_split": "nvme:2,pfs:1"})
    agent.say(rates=RATES, effective=EFFECTIVE)
    assert client.preview_knobs(run, {"tier_split": "nvme:4,pfs:2"}).changed == {}
    seen = client.preview_knobs(run, {"tier_split": "auto", "host_cache": 0})
    assert seen.changed == {"tier_split": "auto", "host_cache": 0}
    assert seen.before["tier_split"] == "nvme:2,pfs:1"
    assert seen.predicted_update_seconds_after is None
    assert seen.predicted_after is None
    assert seen.no_prediction == "No prediction yet: it needs the rates of a few steps."


def test_a_preview_predicts_every_knob_of_storage(daemon: Daemon) -> None:
    """16 subgroups of 8 MB of state, 4 of them in the cache: twelve on the paths."""
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES)
    agent.step = 5
    agent.say(
        rates=STORED,
        effective=EFFECTIVE,
        predicted_update_seconds=0.001,  # of another predictor: previews do not use it
        steps=[step_report(n, 1.0) for n in (1, 2, 3, 4, 5)],
    )

    def after(**changes: Any) -> KnobPreview:
        seen = client.preview_knobs(run, changes)
        assert (seen.no_prediction, seen.predicted_update_seconds_before is not None) == ("", True)
        assert seen.error_ratio == pytest.approx(abs(seen.predicted_update_seconds_before / 1.0 - 1))  # type: ignore[operator]
        assert seen.predicted_after is not None
        assert seen.predicted_phase_seconds_after["update"] == seen.predicted_update_seconds_after
        return seen

    def seconds(**changes: Any) -> float:
        return after(**changes).predicted_update_seconds_after or 0.0

    now = after(static_ratio=0.0)
    assert now.predicted_update_seconds_after == now.predicted_update_seconds_before
    found = now.predicted_after
    assert found is not None
    reads = [found.lane_bytes[f"{path}:read"] for path in PATHS]
    assert sum(reads) == 12 * 8_000_000
    assert reads[0] > reads[1]
    assert found.host_memory_bytes["state"] == 4 * 8_003_584, "whole pages"
    assert found.bound_by in PATHS
    assert found.bound_seconds <= found.update_seconds
    assert found.low_seconds == found.update_seconds
    assert found.high_seconds == pytest.approx(1.0), "updates took longer than this predictor says"
    base = found.update_seconds
    assert seconds(host_cache=0) > base > seconds(host_cache=128_000_000)
    assert seconds(tier_split="pfs:1") > seconds(tier_split="nvme:1") > base
    eq1 = after(tier_split="eq1").predicted_after
    assert eq1 is not None
    assert [eq1.lane_bytes[f"{path}:read"] for path in PATHS] == [8 * 8_000_000, 4 * 8_000_000], "2 to 1"
    assert seconds(order="alternate") > base
    assert seconds(static_ratio=1.0) < base
    assert set(after(tier_split="pfs:1", host_cache=0).predicted_after.stalls) >= {"pfs:read"}  # type: ignore[union-attr]


def test_advice_is_for_pinned_knobs_too(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES, knobs={"tier_split": "pfs:1", "order": "pinned"})
    assert (client.advice(run).changes, client.advice(run).sentence[:15]) == ({}, "No prediction y")
    agent.say(steps=(step_report(1, 1.0).model_copy(update={"verdict": "it waited; raise stride"}),))
    assert client.advice(run).sentence.endswith(" The last step: it waited; raise stride.")
    agent.say(rates=STORED, effective=EFFECTIVE)
    seen = client.advice(run)
    assert seen.changes["tier_split"] == "auto"
    assert "order" not in seen.changes
    assert seen.predicted_update_seconds_now is not None
    assert seen.predicted_update_seconds_then is not None
    assert seen.predicted_update_seconds_then < 0.95 * seen.predicted_update_seconds_now
    assert "tier_split=auto" in seen.sentence
    preview = client.preview_knobs(run, seen.changes)
    assert preview.predicted_update_seconds_after == pytest.approx(seen.predicted_update_seconds_then, rel=1e-6)
    with Agent(daemon, run, 1, paths=PATHS, subgroups=SIZES).answering(), agent.answering():
        client.set_knobs(run, seen.changes, wait=10)
    agent.say(rates=STORED, effective={**EFFECTIVE, **seen.changes})
    assert client.advice(run).changes == {}
    assert f"Nothing is predicted to take {MINIMUM_GAIN:.0%} off" in client.advice(run).sentence


def test_residents_are_advised_where_the_device_has_room_for_them(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES, knobs={"stride": "off"}, device_memory_bytes=200_000_000)
    state = 16 * 8_000_000
    now = {**EFFECTIVE, "stride": "off"}

    def advised(number: int, peak: int) -> float:
        step = step_report(number, 1.0).model_copy(update={"device_memory_peak_bytes": {"update": peak}})
        agent.say(rates=STORED, effective=now, steps=[step])
        return float(client.advice(run).changes.get("static_ratio", 0.0))

    assert advised(1, 200_000_000 - state) >= 0.75
    halfway = [advised(step, 200_000_000 - state // 2) for step in range(2, 4)][-1]
    assert 0 < halfway <= 0.5
    assert advised(4, 200_000_000) == 0.0


def test_eq1_is_a_split_that_needs_no_names(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    with Agent(daemon, run, paths=PATHS).answering():
        assert client.set_knobs(run, {"tier_split": "EQ1"}, wait=5).state in ("committed", "applied")
    assert client.knobs(run).desired["tier_split"] == "eq1"


def test_the_run_has_the_paths_of_its_ranks(daemon: Daemon) -> None:
    run = new_run()
    Agent(daemon, run, 0, paths=("pfs",))
    second = Agent(daemon, run, 1, paths=("nvme", "pfs"))
    assert daemon.client().run(run).paths == ("pfs", "nvme")
    second.client.goodbye(second.id)
    assert daemon.client().run(run).paths == ("pfs",), "of those that are present"


def test_start_up_settings_must_fit_the_paths(daemon: Daemon) -> None:
    agent = daemon.client("agent")
    with pytest.raises(KnobError, match="no storage paths"):
        agent.hello(hello(new_run(), knobs={"order": "pinned"}))
    with pytest.raises(KnobError, match="names 'ssd'"):
        agent.hello(hello(new_run(), knobs={"tier_split": "ssd:1"}, paths=PATHS))
    lease = agent.hello(hello(new_run(), knobs={"tier_split": "pfs:1"}, paths=PATHS))
    assert lease.directive.committed_knobs["tier_split"] == "pfs:1"


def test_a_restart_with_other_paths(daemon: Daemon) -> None:
    """What was desired persists; the ranks get what they can have of it, and stride still turns."""
    run, client = idle(daemon, paths=PATHS), daemon.client()
    client.set_knobs(run, WANTED)
    second = Agent(daemon, run, paths=("ssd",))
    given = client.knobs(run)
    assert (given.desired["tier_split"], given.bounds["tier_split"].paths) == ("nvme:2,pfs:1", ("ssd",))
    fitted = {"stride": 2.0, "static_ratio": 0.0, "tier_split": "auto", "host_cache": 8 * GIB, "order": "pinned"}
    assert second.answer(wait=0).committed_knobs == fitted
    client.set_knobs(run, {"stride": 5}, wait=0)
    assert second.answer().proposed_knobs == {**fitted, "stride": 5.0}
    second.client.goodbye(second.id)
    third = Agent(daemon, run)
    assert third.answer(wait=0).committed_knobs == {"stride": 5.0, "static_ratio": 0.0}
    assert client.knobs(run).desired == {"stride": 5.0, "static_ratio": 0.0}
    third.client.goodbye(third.id)
    fourth = Agent(daemon, run, paths=PATHS)
    assert fourth.answer(wait=0).committed_knobs == {"stride": 5.0, "static_ratio": 0.0, **GOT}


def test_reset_takes_them_back(daemon: Daemon) -> None:
    run, client = idle(daemon, paths=PATHS), daemon.client()
    client.set_knobs(run, WANTED)
    Agent(daemon, run, paths=PATHS, reset_knobs=True)
    made = client.generations(run)[-1]
    assert made.changes == {"tier_split": "auto", "host_cache": "auto", "order": "auto"}
    assert client.knobs(run).desired["host_cache"] == "auto"


def test_a_state_of_before_still_loads(tmp_path: Path) -> None:
    """Rows as the version without these knobs wrote them."""
    run = new_run()
    with threaded(tmp_path) as daemon:
        agent = Agent(daemon, run, paths=PATHS)
        agent.client.goodbye(agent.id)
        agent = Agent(daemon, "plain")
        agent.client.goodbye(agent.id)
    with sqlite3.connect(tmp_path / "tidegate.db") as rows:
        rows.execute("""UPDATE generations SET knobs = '{"stride": 3.0, "static_ratio": 0.0}'""")
        rows.execute("UPDATE agents SET hello = json_remove(hello, '$.paths') WHERE run = 'plain'")
    rows.close()
    with threaded(tmp_path) as daemon:
        client = daemon.client()
        assert client.knobs("plain").desired == {"stride": 3.0, "static_ratio": 0.0}
        assert client.knobs(run).desired["tier_split"] == "auto"
        agent = Agent(daemon, run, paths=PATHS, knobs={"stride": 4.0}, reset_knobs=True)
        agent.client.goodbye(agent.id)
        assert client.generations(run)[-1].changes == {"stride": 4.0}, "what it lacks was auto"
        client.set_knobs(run, {"stride": 3.0})
        assert client.set_knobs(run, WANTED).knobs == {"stride": 3.0, "static_ratio": 0.0, **GOT}
    with threaded(tmp_path) as daemon:
        assert daemon.client().knobs(run).desired == {"stride": 3.0, "static_ratio": 0.0, **GOT}, "whole bytes included"


def test_nothing_is_predicted_of_a_policy_that_the_model_does_not_know(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    Agent(daemon, run, paths=PATHS, subgroups=SIZES, policy="twinflow").say(rates=STORED, effective=EFFECTIVE)
    assert "this run has policy=twinflow" in client.advice(run).sentence
    assert client.advice(run).changes == {}
    seen = client.preview_knobs(run, {"stride": 3.0})
    assert seen.predicted_update_seconds_after is None
    assert "this run has policy=twinflow" in seen.no_prediction


def test_a_retired_path_has_no_part_in_predictions(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES)
    for retired, moved in ((False, True), (True, False)):
        states = tuple(PathState(path=path, retired=retired and path == "pfs") for path in PATHS)
        step = step_report(1 + retired).model_copy(update={"path_states": states})
        agent.say(rates=STORED, effective=EFFECTIVE, steps=(step,))
        seen = client.preview_knobs(run, {"tier_split": "eq1"}).predicted_after
        assert seen is not None
        assert (seen.lane_bytes["pfs:write"] > 0) is moved
        assert seen.lane_bytes["nvme:write"] > 0


def test_a_preview_says_that_a_retired_path_will_be_refused(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES, knobs={"tier_split": "pfs:1"})
    evidence = ModelEvidence(retired=("nvme",), retired_reasons={"nvme": "Path nvme: No space left."})
    agent.say(rates=STORED, effective=EFFECTIVE, evidence=evidence, steps=(step_report(1),))
    seen = client.preview_knobs(run, {"tier_split": "nvme:1,pfs:1"})
    assert seen.no_prediction == "Will be refused: nvme is retired on rank 0: Path nvme: No space left."
    assert (seen.predicted_after, seen.predicted_update_seconds_after, seen.no_room, seen.notes) == (None, None, "", ())
    for works in ({"tier_split": "nvme:0,pfs:2"}, {"tier_split": "auto"}, {"stride": 3}):
        assert "refused" not in client.preview_knobs(run, works).no_prediction
    view = client.knobs(run)
    assert view.retired == {"nvme": "on rank 0: Path nvme: No space left."}
    assert view.bounds["tier_split"].paths == PATHS, "weight 0 is accepted"


def test_a_preview_of_the_automatic_cache_names_the_number_to_preview(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES, knobs={"host_cache": 1})
    evidence = ModelEvidence(automatic_cache_bytes=48_123_456)
    agent.say(rates=STORED, effective=EFFECTIVE, evidence=evidence, steps=(step_report(1),))
    said = client.preview_knobs(run, {"host_cache": "auto"}).no_prediction
    assert said == (
        "No prediction: the ranks choose host_cache after the change. host_cache=auto would be 45.9MiB on rank 0 now; "
        "preview a number to see its effect: host_cache=45.9MiB."
    )
    assert client.preview_knobs(run, {"host_cache": "45.9MiB"}).predicted_after is not None


def test_a_preview_says_how_much_of_the_cache_is_used(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES)
    agent.say(rates=STORED, effective=EFFECTIVE, steps=(step_report(1),))
    seen = client.preview_knobs(run, {"host_cache": "999GiB"})
    state = client.knobs(run).ranks[0].state_bytes
    assert state == 16 * 8_000_000
    assert seen.notes == (
        "host_cache=999GiB is more than the state of rank 0, 128MB: only as much as the state needs is used.",
    )
    assert client.preview_knobs(run, {"host_cache": state}).notes == ()


def test_a_preview_marks_a_path_whose_speed_rests_on_little(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES)

    def say(step: int, **moved: int) -> None:
        rows = tuple(
            PathRow(path=path, operation="read", phase="update", bytes=nbytes, busy_seconds=0.1)
            for path, nbytes in moved.items()
        )
        report = step_report(step).model_copy(update={"paths": rows})
        agent.say(rates=STORED, effective=EFFECTIVE, steps=(report,))

    say(1, nvme=500_000_000, pfs=1_000_000)
    (said,) = client.preview_knobs(run, {"tier_split": "nvme:1,pfs:3"}).notes
    assert said.startswith("Speed of pfs from little: the last 1 steps moved 1.00 MB there, one step would move ")
    assert client.preview_knobs(run, {"tier_split": "nvme:1"}).notes == ()
    say(2, pfs=200_000_000)
    assert client.preview_knobs(run, {"tier_split": "nvme:1,pfs:3"}).notes == ()


def test_a_preview_tells_which_path_cannot_hold_its_share(daemon: Daemon) -> None:
    """12 of 16 subgroups are on the paths, and the rank has told that pfs holds no more than 3."""
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES)

    def can_hold(**most: int) -> None:
        states = tuple(PathState(path=path, capacity_subgroups=most.get(path)) for path in PATHS)
        agent.step += 1
        step = step_report(agent.step).model_copy(update={"path_states": states})
        agent.say(rates=STORED, effective=EFFECTIVE, steps=(step,))

    can_hold(pfs=3)
    seen = client.preview_knobs(run, {"tier_split": "nvme:1,pfs:1"})
    assert seen.no_room.startswith("Path pfs would get 6 subgroups and can hold 3; nvme takes 9.")
    assert seen.predicted_after is not None
    assert seen.predicted_after.lane_bytes["nvme:write"] == 9 * 8_000_000
    assert client.preview_knobs(run, {"tier_split": "nvme:3,pfs:1"}).no_room == ""
    can_hold(nvme=4, pfs=3)
    refused = client.preview_knobs(run, {"tier_split": "nvme:1,pfs:1"})
    assert "12 subgroups do not fit on the paths: nvme takes 4, pfs takes 3, 7 in all." in refused.no_room
    assert (refused.predicted_after, refused.no_prediction) == (
        None,
        "No prediction: the state does not fit with these knobs.",
    )


CRAWLING = STORED.model_copy(
    update={"paths": {**STORED.paths, "pfs": {"read_bytes_per_second": 1e5, "write_bytes_per_second": 1e5}}}
)


@pytest.mark.parametrize("split", ["auto", "nvme:1,pfs:1", "pfs:1"])
def test_the_advice_for_a_slow_path_avoids_it_and_names_memory_beside(daemon: Daemon, split: str) -> None:
    """A path at 1/1000 of its speed: even the one subgroup that `auto` leaves there holds each update up."""
    run, client = new_run(), daemon.client(timeout=60.0)  # each advice computes for a second, alone
    knobs = {"tier_split": split, "order": "pinned", "stride": "off"}
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES, knobs=knobs, device_memory_bytes=400_000_000)

    def advised(number: int, peak: int) -> Advice:
        step = step_report(number, 1.0).model_copy(update={"device_memory_peak_bytes": {"update": peak}})
        agent.say(rates=CRAWLING, effective={**EFFECTIVE, "stride": "off"}, steps=[step])
        return client.advice(run)

    roomy = advised(1, 100_000_000)
    assert (roomy.changes["tier_split"], "static_ratio" in roomy.changes) == ("nvme:1", False)
    assert "Path pfs holds no state then; tier_split=auto uses it again." in roomy.sentence
    assert "more of device memory; 300 MB are free." in roomy.sentence
    assert "static_ratio=" in roomy.sentence
    assert roomy.predicted_update_seconds_then is not None
    assert roomy.predicted_update_seconds_now is not None
    assert roomy.predicted_update_seconds_then < roomy.predicted_update_seconds_now / 10
    full = advised(2, 400_000_000)
    assert full.changes == roomy.changes
    assert "device memory" not in full.sentence


def test_advice_and_preview_tell_what_device_memory_they_take(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    knobs = {"stride": "off", "tier_split": "nvme:2,pfs:1"}
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES, knobs=knobs, device_memory_bytes=1_000_000_000)
    step = step_report(1, 1.0).model_copy(update={"device_memory_peak_bytes": {"update": 800_000_000}})
    agent.say(rates=STORED, effective={**EFFECTIVE, "stride": "off"}, steps=[step])
    seen = client.advice(run)
    assert "It takes 128 MB more of device memory; 200 MB are free." in seen.sentence, seen
    (told,) = [note for note in client.preview_knobs(run, {"static_ratio": 1.0}).notes if "memory" in note]
    assert told == "It takes 128 MB more of device memory; 200 MB are free."
    step = step.model_copy(update={"step": 2, "device_memory_peak_bytes": {"update": 900_000_000}})
    agent.say(rates=STORED, effective={**EFFECTIVE, "stride": "off"}, steps=[step])
    (told,) = [note for note in client.preview_knobs(run, {"static_ratio": 1.0}).notes if "memory" in note]
    assert told == "It takes 128 MB more of device memory; 100 MB are free: it does not fit."
    assert client.advice(run).changes.get("static_ratio", 0) < 1


def test_advice_leaves_free_what_a_canary_asks_for(daemon: Daemon) -> None:
    """128 MB of state would fit, and leave less than 5 % of the memory free."""
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run, paths=PATHS, subgroups=SIZES, knobs={"stride": "off"}, device_memory_bytes=1_000_000_000)
    step = step_report(1, 1.0).model_copy(update={"device_memory_peak_bytes": {"update": 830_000_000}})
    agent.say(rates=STORED, effective={**EFFECTIVE, "stride": "off"}, steps=[step])
    assert 0.5 < client.advice(run).changes["static_ratio"] < 1
