"""The tuner in the rank, previews, canaries and advice predict the same for the same knobs at the same moment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tidegate
from tests.daemon.live import Daemon, new_run, wait_until
from tidegate.agent.control.rank_predictor import rank_predictor
from tidegate.daemon.control.preview import prediction_inputs
from tidegate.knobs.knobs import Knobs
from tidegate.wire.canary import CanaryRequest

WIDTH, STEPS = 192, 8
CHOICES = (
    {"stride": 2.0}, {"stride": "off"}, {"static_ratio": 0.25}, {"stride": 1.0, "order": "alternate"},
    {"tier_split": "nvme:1", "host_cache": 0}, {"tier_split": "eq1"},
)  # fmt: skip


@pytest.mark.parametrize("gradients", ["keep", "release"])
def test_tuner_preview_and_canary_predict_the_same(daemon: Daemon, tmp_path: Path, gradients: str) -> None:
    """After a param group was added: sizes, order of gradients, paths, and memory for gradients are those of now."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)), torch.nn.Linear(WIDTH, 8).bfloat16()
    )
    paths = {name: tmp_path / name for name in ("nvme", "pfs")}
    for path in paths.values():
        path.mkdir()
    offload = tidegate.Offload(
        stride=4.0, static_ratio=0.1, subgroup_numel=20_000, cpu_threads=1, paths=paths, host_cache=200_000,
        gradients=gradients, gradient_memory_bytes=100_000 if gradients == "release" else 0,
    )  # fmt: skip
    run, client = new_run(), daemon.client()
    with (
        tidegate.AdamW(model[:3].parameters(), offload=offload) as optimizer,
        tidegate.attach(optimizer, model, run=run, daemon=daemon.url, token=daemon.tokens["agent"]) as attachment,
    ):

        def step() -> None:
            optimizer.zero_grad()
            hidden = model[:4](torch.randn(4, WIDTH))
            (hidden.square().mean() + model[4](hidden.bfloat16()).float().square().mean()).backward()
            optimizer.step()

        def reported() -> bool:
            return client.run(run).ranks[0].step == attachment.recorder.totals.steps

        step()
        optimizer.add_param_group({"params": [*model[3].parameters(), *model[4].parameters()]})
        for _ in range(STEPS):
            step()
        wait_until(reported, "the report of the last step")

        def by_tuner(knobs: Knobs) -> float:
            return rank_predictor(optimizer, attachment.recorder).update_seconds(optimizer._effective(knobs))

        known = prediction_inputs(daemon.app.state.plane.registry.run(run))
        assert known is not None
        mine = rank_predictor(optimizer, attachment.recorder)
        assert known.predictor == mine, "sizes, order, speeds, capacities, memory: all that is known"
        assert any(s.state_bytes == 10 for s in mine.rank.subgroups), "of the group that was added"
        seen = set()
        for changes in CHOICES:
            knobs = optimizer.knobs.changed(changes)
            expected = by_tuner(knobs)
            seen.add(expected)
            assert client.preview_knobs(run, changes).predicted_update_seconds_after == expected
        assert len(seen) > len(CHOICES) // 2, "tier splits predict the same where both paths are equally fast"
        expected = by_tuner(optimizer.knobs.changed({"stride": "off"}))
        made = client.set_knobs(run, {"stride": "off"}, canary=CanaryRequest(steps=5))
        assert made.canary is not None
        assert made.canary.predicted_update_seconds_after == expected
