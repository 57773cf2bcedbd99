"""What the agent says about itself: phases partition time, stalls and compute make up the update."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import tidegate
from tests.agent.training import Training, batch
from tests.services import program
from tests.timeline.compute import compute_seconds
from tidegate.agent.engine import phases
from tidegate.agent.engine.phases import SHORT_SECONDS, PhaseRecorder
from tidegate.agent.telemetry import exporter, recorder
from tidegate.knobs.knobs import Off, device_share
from tidegate.metrics.catalogue import METRICS
from tidegate.plan import Plan
from tidegate.timeline.stall_analysis import stalls
from tidegate.timeline.step_record import FinishedStep
from tidegate.timeline.step_result import StepPhases
from tidegate.timeline.timeline import PHASES
from tidegate.tuner.tuner import FIRST_SEARCH_STEPS
from tidegate.wire.timeline import MAX_SPANS
from tidegate.wire.translation import view_of

STEPS = 12


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[Training, tidegate.Attachment]]:
    training = Training(stride=2.0, static_ratio=0.25)
    with training.optimizer:
        attachment = tidegate.attach(training.optimizer, training.model, run="telemetry")
        for step in range(STEPS):
            training.optimizer.log(loss=1.0 / (step + 1), tokens=100)
            training.step()
        yield training, attachment


def scrape(attachment: tidegate.Attachment) -> str:
    return httpx.get(f"http://{attachment.metrics_address}/metrics", trust_env=False).text


def test_phases_follow_each_other_without_gap_or_overlap(run: tuple[Training, tidegate.Attachment]) -> None:
    timeline = run[1].recorder.timeline
    assert timeline is not None
    assert {p.phase for p in timeline.phases} == {"other", "forward", "backward", "update"}
    for one, following in zip(timeline.phases, timeline.phases[1:], strict=False):
        assert one.end == pytest.approx(following.start, abs=1e-9)
    order = [p.phase for p in timeline.phases if p.phase != "other"]
    assert order == ["forward", "backward", "update"]


def test_stalls_and_compute_make_up_the_update(run: tuple[Training, tidegate.Attachment]) -> None:
    timeline = run[1].recorder.timeline
    assert timeline is not None
    window = timeline.window("update")
    assert window is not None
    waited = sum(stall.end - stall.start for stall in stalls(timeline))
    assert waited + compute_seconds(timeline) == pytest.approx(window[1] - window[0], rel=0.01)
    last = run[1].recorder.totals.last
    assert last is not None
    told = sum(row.seconds for row in last.stalls if row.phase == "update")
    assert told == pytest.approx(waited, rel=1e-6)


def test_every_family_of_the_agent_is_exported_with_its_labels(run: tuple[Training, tidegate.Attachment]) -> None:
    families = {family.name: family for family in text_string_to_metric_families(scrape(run[1]))}
    known = [metric for metric in METRICS if not metric.needs]
    for metric in known:
        name = metric.name.removesuffix("_total")
        assert name in families, metric.name
        family = families[name]
        assert family.type == metric.type
        assert len(family.samples) <= metric.max_series()
        for sample in family.samples:
            labels = {label: value for label, value in sample.labels.items() if label != "le"}
            assert set(labels) == set(metric.labels), sample
            for label, value in labels.items():
                assert value in metric.values(label), sample
    assert {name for name in families if name.startswith("tidegate_")} == {
        metric.name.removesuffix("_total") for metric in known
    }


def test_promtool_accepts_the_scrape_and_series_are_few(run: tuple[Training, tidegate.Attachment]) -> None:
    text = scrape(run[1])
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 600


def test_where_openmetrics_is_negotiated_buckets_say_which_step_fell_into_them(
    run: tuple[Training, tidegate.Attachment],
) -> None:
    accepted = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    answer = httpx.get(f"http://{run[1].metrics_address}/metrics", headers=accepted, trust_env=False)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(answer.text)}
    assert "_created" not in answer.text
    seconds = {step.step: step.phase_seconds["update"] for step in run[1].recorder.take_unreported()}
    found = [
        sample
        for sample in families["tidegate_phase_seconds"].samples
        if sample.exemplar is not None and sample.labels["phase"] == "update"
    ]
    assert found
    for sample in found:
        assert sample.exemplar is not None
        assert seconds[int(sample.exemplar.labels["step"])] == sample.exemplar.value <= float(sample.labels["le"])
    assert max(int(sample.exemplar.labels["step"]) for sample in found if sample.exemplar) == STEPS
    assert not any("step" in line for line in scrape(run[1]).splitlines() if "bucket" in line)


def test_each_rank_has_a_registry_and_a_port_of_its_own(run: tuple[Training, tidegate.Attachment]) -> None:
    other = Training()
    with other.optimizer, tidegate.attach(other.optimizer, other.model, run="other") as attachment:
        other.step()
        assert attachment.metrics_address != run[1].metrics_address
        assert "tidegate_steps_total 1.0" in scrape(attachment)
        assert f"tidegate_steps_total {STEPS}.0" in scrape(run[1])


def test_what_training_makes_and_what_watching_costs(run: tuple[Training, tidegate.Attachment]) -> None:
    values: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(scrape(run[1])):
        for sample in family.samples:
            values[sample.name] += sample.value
    assert values["tidegate_steps_total"] == STEPS
    assert values["tidegate_tokens_total"] == 100 * STEPS
    assert values["tidegate_loss"] == pytest.approx(1 / STEPS)
    assert values["tidegate_grad_norm"] > 0
    assert values["tidegate_phase_seconds_count"] == 4 * STEPS
    assert values["tidegate_predicted_phase_seconds"] > 0
    assert 0 < values["tidegate_agent_overhead_seconds_total"] < 0.05 * values["tidegate_phase_seconds_sum"]


def test_the_daemon_is_sent_what_the_timeline_says(run: tuple[Training, tidegate.Attachment]) -> None:
    last = run[1].recorder.last_step
    assert last is not None
    timeline, sent = last.timeline, view_of(last)
    assert sent.num_spans == len(sent.spans) == len(timeline.spans) > 0
    for row, span in zip(sent.spans, timeline.spans, strict=True):
        assert all(getattr(row, name) == getattr(span, name) for name in type(row).model_fields)
    assert [(row.phase, row.start, row.end) for row in sent.phases] == [
        (p.phase, p.start, p.end) for p in timeline.phases
    ]
    assert sent.deps == {op: deps for op, deps in timeline.deps.items() if deps}
    assert (sent.step, sent.origin) == (STEPS, timeline.origin)
    assert sent.origin == pytest.approx(time.time(), abs=600)


def test_of_a_long_timeline_the_first_spans_are_sent_with_their_dependencies(
    run: tuple[Training, tidegate.Attachment],
) -> None:
    last = run[1].recorder.last_step
    assert last is not None
    spans = tuple(last.result.spans[0]._replace(op=op) for op in range(3 * MAX_SPANS))
    deps = {op: (op - 1,) if op else () for op in range(3 * MAX_SPANS)}
    sent = view_of(dataclasses.replace(last, result=dataclasses.replace(last.result, spans=spans), deps=deps))
    assert (len(sent.spans), sent.num_spans) == (MAX_SPANS, 3 * MAX_SPANS)
    assert sent.deps == {op: deps[op] for op in range(1, MAX_SPANS)}


def test_plans_that_take_turns_are_each_held_against_their_own_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    predicted: list[int] = []

    def counted(plan: Plan, *more: Any, **named: Any) -> float:
        predicted.append(id(plan))
        return real(plan, *more, **named)

    def compared(meter: Any, step: FinishedStep, report: Any, seconds: Mapping[str, float]) -> float | None:
        held.append((step.result.plan, seconds))
        return add_step(meter, step, report, seconds)

    held: list[tuple[Plan, Mapping[str, float]]] = []
    real, add_step = recorder.update_seconds, recorder.step_metrics.add_step
    monkeypatch.setattr(recorder, "update_seconds", counted)
    monkeypatch.setattr(recorder.step_metrics, "add_step", compared)
    monkeypatch.setattr(recorder, "PREDICTION_SHARE", 1e-12)  # once for each plan
    training = Training(
        paths={name: tmp_path / name for name in ("a", "b")}, order="alternate", host_cache=7_000_000,
        tier_split="a:1,b:1",
    )  # fmt: skip
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="turns")
        # Speeds of paths that change may make other plans now and then: until the same two have taken turns.
        for _ in range(40):
            training.step()
            attachment.recorder.catch_up()
            turns = [plan for plan, _ in held[-4:]]
            if len(turns) == 4 and turns[0] is turns[2] is not turns[1] is turns[3]:
                break
        assert turns[0] is turns[2] is not turns[1] is turns[3]
        assert all(set(seconds) == {"forward", "backward", "update"} for _, seconds in held[-2:])
        assert set(attachment.recorder.rows("tidegate_prediction_error_ratio")) == {
            ("forward",), ("backward",), ("update",)
        }  # fmt: skip
        assert len(predicted) < len(held), "none is predicted anew whenever its turn comes"


def test_a_loss_that_is_logged_now_and_then_stays() -> None:
    training = Training()
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="loss")
        optimizer.log(loss=0.5)
        training.step()
        training.step()
        assert attachment.recorder.rows("tidegate_loss") == {(): 0.5}


def test_a_scraper_that_says_nothing_is_hung_up_on(
    run: tuple[Training, tidegate.Attachment], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exporter._Handler.timeout == 5
    monkeypatch.setattr(exporter._Handler, "timeout", 0.05)
    host, _, port = run[1].metrics_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as silent:
        assert silent.recv(1) == b""


def test_a_step_that_has_no_figures_is_logged_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = recorder.report_of

    def broken(step: Any, work: Any) -> Any:
        if step.number == 2:
            raise ZeroDivisionError
        return real(step, work)

    monkeypatch.setattr(recorder, "report_of", broken)
    training = Training()
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="broken")
        for _ in range(4):
            training.step()
        assert [step.step for step in attachment.recorder.take_unreported()] == [1, 3, 4]
        assert attachment.recorder.totals.steps == 4
    assert "step 2 could not be recorded" in caplog.text


def test_steps_that_nobody_asks_for_are_counted_by_the_training_thread_itself() -> None:
    training = Training()
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="alone")
        made = attachment.recorder._totals
        for _ in range(recorder.MAX_UNPROCESSED_STEPS + 4):
            training.step()
        assert made.steps >= recorder.MAX_UNPROCESSED_STEPS
        assert attachment.recorder.totals.steps == recorder.MAX_UNPROCESSED_STEPS + 4


def test_steps_that_could_not_be_delivered_come_first_and_the_oldest_fall_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_UNREPORTED_STEPS", 4)
    training = Training()
    with training.optimizer as optimizer:
        kept = tidegate.attach(optimizer, training.model, run="late").recorder
        for told in ([1, 2], [1, 2, 3, 4], [3, 4, 5, 6]):
            training.step()
            undelivered = kept.take_unreported()
            training.step()
            kept.catch_up()
            kept.give_back(undelivered)
            taken = kept.take_unreported()
            assert [step.step for step in taken] == told
            kept.give_back(taken)


def test_figures_that_two_threads_ask_for_at_once_are_made_once() -> None:
    training = Training()
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="both")
        taken: list[int] = []
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                taken.extend(step.step for step in attachment.recorder.take_unreported())

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            training.step()
        done.set()
        for thread in threads:
            thread.join()
        taken.extend(step.step for step in attachment.recorder.take_unreported())
        assert sorted(taken) == list(range(1, 11))


def test_a_scrape_costs_all_that_its_thread_does(
    run: tuple[Training, tidegate.Attachment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formatting and writing too, not only the collecting."""
    choose = exporter.choose_encoder

    def slow(accept: str) -> Any:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return choose(accept)

    monkeypatch.setattr(exporter, "choose_encoder", slow)
    before = run[1].overhead["exporter"]
    scrape(run[1])
    scrape(run[1])
    # The second one's thread may still be ending.
    assert run[1].overhead["exporter"] - before >= 0.02


def test_a_peak_belongs_to_its_phase_and_a_moment_between_two_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0, 2.0, 3.0, 3.0 + SHORT_SECONDS / 2, 4.0, 5.0]
    times, own, peaks = iter(now), itertools.count(0, 0.125), iter([10, 20, 30, 40])
    clock = SimpleNamespace(monotonic=lambda: next(times), thread_time=lambda: next(own), process_time=lambda: 0.0)
    monkeypatch.setattr(phases, "time", clock)
    watched = PhaseRecorder(lambda: next(peaks))
    for phase in ("forward", "other", "backward", "update"):
        watched.enter(phase)
    found = watched.end_step()
    assert found.device_peak_bytes == {"other": 10, "forward": 20, "backward": 30, "update": 40}
    assert [(span.phase, span.start, span.end) for span in found.spans] == list(
        zip(("other", "forward", "other", "backward", "update"), now, now[1:], strict=False)
    )
    assert (found.clock_cpu_seconds, watched.cpu_seconds) == (5 * 0.125, 0.0)


def test_accumulated_micro_batches_are_one_step_and_evaluation_is_other() -> None:
    training = Training()
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="micro")
        finished: list[StepPhases] = []
        optimizer.observers.append(lambda _, phases: finished.append(phases))
        for micro in range(3):
            training.model(batch(micro)).backward()
        optimizer.step()
        began = time.monotonic()
        with torch.no_grad():
            training.model(batch(9))
        ended = time.monotonic()
        optimizer.zero_grad()
        training.model(batch(3)).backward()
        optimizer.step()
        reports = attachment.recorder.take_unreported()
    assert [report.step for report in reports] == [1, 2]
    first, second = ([span for span in phases.spans if span.phase != "other"] for phases in finished)
    assert [span.phase for span in first] == ["forward", "backward"] * 3 + ["update"]
    assert [span.phase for span in second] == ["forward", "backward", "update"]
    backward = sum(span.end - span.start for span in first if span.phase == "backward")
    assert reports[0].phase_seconds["backward"] == pytest.approx(backward)
    others = [span for span in finished[1].spans if span.phase == "other"]
    assert any(span.start <= began < ended <= span.end for span in others)


def test_a_skipped_step_is_counted_and_updates_nothing() -> None:
    training = Training()
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="skip")
        training.model(batch(0)).backward()
        next(training.model.parameters()).grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
        optimizer.step()
        last = attachment.recorder.totals.last
        assert last is not None
        assert last.skipped
        assert "was skipped, because a gradient was not finite" in last.verdict
        assert last.update_params == {"cpu": 0, "device": 0}
        assert attachment.recorder.rows("tidegate_skipped_steps_total")[()] == 1


def test_checkpointing_is_a_phase_of_its_own() -> None:
    training = Training()
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="checkpoint")
        training.step()
        optimizer.state_dict()
        training.step()
        last = attachment.recorder.totals.last
        assert last is not None
        assert last.phase_seconds["checkpoint"] > 0
        assert set(last.phase_seconds) <= set(PHASES)


@pytest.mark.slow
def test_auto_moves_to_what_measured_rates_call_for_and_weights_do_not_care() -> None:
    """Copies are so slow that the CPU alone is many times faster, however busy this machine is."""
    slow = tidegate.EmulatedRates(h2d_bytes_per_second=3e7, d2h_bytes_per_second=3e7, update_params_per_second=1e8)
    training, pinned = Training(stride="auto", emulated=slow), Training(stride=2.0)
    with training.optimizer, pinned.optimizer:
        tidegate.attach(training.optimizer, training.model, run="auto")
        strides: list[float | Off] = []
        training.optimizer.observers.append(lambda result, _: strides.append(result.effective.stride))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for _ in range(FIRST_SEARCH_STEPS + 2):
            training.step()
            pinned.step()
        torch.set_num_threads(threads)
        assert strides[0] == 2.0
        assert device_share(strides[-1]) < 0.5, "less for the device"
        for mine, theirs in zip(training.model.parameters(), pinned.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
