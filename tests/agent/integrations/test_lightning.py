"""Lightning, for real: precisions with clipping, resume, a second fit, the search for a learning rate."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST
from tests.services import assert_nothing_grows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.tuner import Tuner

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.`.*"),
]

OFFLOAD = tidegate.Offload(stride=2.0, subgroup_numel=50, emulated=FAST)


class Regression(lightning.LightningModule):
    """Two layers. `ours`: with `tidegate.AdamW` instead of torch's."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ours, self.lr = ours, 1e-2
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ours:
            return tidegate.AdamW(self.parameters(), lr=self.lr, offload=OFFLOAD)
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def batches() -> torch.utils.data.DataLoader[torch.Tensor]:
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(list(data), batch_size=4)  # type: ignore[arg-type]


def trainer_of(folder: Path, steps: int, **settings: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(default_root_dir=folder, max_steps=steps, max_epochs=-1, **{**quiet, **settings})


def fit(folder: Path, ours: bool, steps: int = 12, **settings: Any) -> Regression:
    model = Regression(ours)
    trainer_of(folder, steps, enable_checkpointing=False, **settings).fit(model, batches())
    return model


def assert_alike(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_it_trains_as_with_torchs_adamw_and_clips(tmp_path: Path, precision: str, algorithm: str) -> None:
    clipped = {"precision": precision, "gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    mine, theirs = (fit(tmp_path, ours, **clipped) for ours in (True, False))
    assert_alike(mine, theirs)


def test_a_second_fit_of_the_same_model_takes_over(tmp_path: Path) -> None:
    mine, theirs = Regression(True), Regression(False)
    for model in (mine, theirs):
        trainer_of(tmp_path, 5, enable_checkpointing=False).fit(model, batches())
        trainer_of(tmp_path, 5, enable_checkpointing=False).fit(model, batches())
    assert_alike(mine, theirs)


def test_many_fits_leave_nothing_behind(tmp_path: Path) -> None:
    model = Regression(True)
    assert_nothing_grows(lambda _: trainer_of(tmp_path, 2, enable_checkpointing=False).fit(model, batches()), rounds=4)


def test_a_fit_that_is_resumed_equals_one_of_torchs(tmp_path: Path) -> None:
    mine, theirs = (resumed(tmp_path / str(ours), ours) for ours in (True, False))
    assert_alike(mine, theirs)


def resumed(folder: Path, ours: bool) -> Regression:
    first = trainer_of(folder, 8)
    first.fit(Regression(ours), batches())
    first.save_checkpoint(folder / "saved.ckpt")
    model = Regression(ours)
    trainer_of(folder, 16).fit(model, batches(), ckpt_path=folder / "saved.ckpt", weights_only=False)
    return model


@pytest.mark.slow
def test_the_search_for_a_learning_rate_leaves_all_as_it_was(tmp_path: Path) -> None:
    found = {}
    for ours in (True, False):
        model = Regression(ours)
        trainer = trainer_of(tmp_path, 8)
        search = Tuner(trainer).lr_find(model, train_dataloaders=batches(), num_training=15, update_attr=True)
        assert search is not None
        trainer.fit(model, batches())
        found[ours] = model, search.results["loss"]
    torch.testing.assert_close(torch.tensor(found[True][1]), torch.tensor(found[False][1]), rtol=0, atol=1e-6)
    assert_alike(found[True][0], found[False][0])


def test_fp16_with_its_scaler_clips_and_trains(tmp_path: Path) -> None:
    """Lightning's own plugin, with a scaler that works on the CPU, too."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    trained = {}
    for ours in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        trained[ours] = fit(tmp_path, ours, plugins=[plugin], gradient_clip_val=0.01), scaler.get_scale()
    assert trained[True][1] == trained[False][1]
    assert_alike(trained[True][0], trained[False][0])
