"""What the agent says about itself: phases partition time, stalls and compute make up the update."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterator

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import tidegate
from tests.agent.training import Training, batch
from tests.services import program
from tidegate.analysis import compute_seconds, stalls
from tidegate.catalogue import METRICS
from tidegate.timeline import PHASES

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
    for metric in METRICS:
        name = metric.name.removesuffix("_total")
        assert name in families, metric.name
        family = families[name]
        assert family.type == metric.type
        for sample in family.samples:
            labels = {label: value for label, value in sample.labels.items() if label != "le"}
            assert set(labels) == set(metric.labels), sample
            for label, value in labels.items():
                assert value in metric.labels[label], sample
    assert {name for name in families if name.startswith("tidegate_")} == {
        metric.name.removesuffix("_total") for metric in METRICS
    }


def test_promtool_accepts_the_scrape_and_series_are_few(run: tuple[Training, tidegate.Attachment]) -> None:
    text = scrape(run[1])
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 600


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


def test_accumulated_micro_batches_are_one_step_and_evaluation_is_other() -> None:
    training = Training()
    with training.optimizer as optimizer:
        attachment = tidegate.attach(optimizer, training.model, run="micro")
        for micro in range(3):
            training.model(batch(micro)).backward()
        optimizer.step()
        with torch.no_grad():
            training.model(batch(9))
        optimizer.zero_grad()
        training.model(batch(3)).backward()
        optimizer.step()
        steps = attachment.recorder.take_unreported()
        assert [s.step for s in steps] == [1, 2]
        first, second = steps
        assert first.phase_seconds["backward"] > 1.5 * second.phase_seconds["backward"]
        assert second.phase_seconds["other"] > 0.3 * second.phase_seconds["forward"]


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
        assert last.update_params == {"cpu": 0, "device": 0}
        assert attachment.recorder.totals.skipped == 1


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


def test_auto_moves_to_what_measured_rates_call_for_and_weights_do_not_care() -> None:
    slow = tidegate.EmulatedRates(h2d_bytes_per_second=3e7, d2h_bytes_per_second=3e7, update_params_per_second=1e8)
    training, pinned = Training(stride="auto", emulated=slow), Training(stride=2.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with training.optimizer, pinned.optimizer:
        attachment = tidegate.attach(training.optimizer, training.model, run="auto")
        assert training.optimizer.effective_knobs()["stride"] == 2.0
        for _ in range(11):
            training.step()
            pinned.step()
        assert training.optimizer.effective_knobs()["stride"] != 2.0
        update_seconds = [step.phase_seconds["update"] for step in attachment.recorder.take_unreported()]
        assert min(update_seconds[9:]) < 0.95 * min(update_seconds[2:8])
        for mine, theirs in zip(training.model.parameters(), pinned.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    torch.set_num_threads(threads)
