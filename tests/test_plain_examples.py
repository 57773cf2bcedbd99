"""Examples that have the same script without Tidegate beside them: few lines differ, and both train alike."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from docs import show_differences
from tests.services import ROOT
from tests.test_examples import EXAMPLES, run

PLAIN = EXAMPLES / "plain"
NAMES = show_differences.names()
ROW = re.compile(r"^\| \[(\w+\.py)\]\(\1\) \| .* \| (\d+), \[shown\]\(\S+\) \|$", re.MULTILINE)


def test_the_page_shows_the_differences() -> None:
    done = subprocess.run([sys.executable, "-m", "docs.show_differences", "--check"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", NAMES)
def test_fewer_than_ten_lines_differ(name: str) -> None:
    assert 0 < show_differences.changed_lines(name) < 10
    assert "tidegate" not in (PLAIN / name).read_text().lower()


def test_the_readme_of_the_examples_has_the_numbers_of_lines() -> None:
    named = ROW.findall((EXAMPLES / "README.md").read_text())
    assert sorted(named) == [(name, str(show_differences.changed_lines(name))) for name in NAMES]


def numbers(said: str) -> torch.Tensor:
    """All losses that a script has printed."""
    found = [float(number) for number in re.findall(r"loss (\d+\.\d+)", said)]
    assert found, said
    return torch.tensor(found)


def assert_same_losses(ours: str, plain: str) -> None:
    """They are printed with four digits: the last one may be rounded to another side."""
    torch.testing.assert_close(numbers(ours), numbers(plain), rtol=0, atol=1.5e-4)


def assert_same_weights(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == plain.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(
            weight, plain[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def nanogpt(folder: Path, script: Path, *options: str) -> tuple[str, dict[str, torch.Tensor]]:
    said = run(folder, str(script), "--eval-interval=10", "--iters=20", *options)
    return said, torch.load(folder / "nanogpt" / "ckpt.pt")["model"]


@pytest.mark.slow
def test_nanogpt_trains_alike_and_each_resumes_from_the_other(tmp_path: Path) -> None:
    scripts = {"ours": EXAMPLES / "nanogpt.py", "plain": PLAIN / "nanogpt.py"}
    made = {}
    for first, second in (("ours", "plain"), ("plain", "ours")):
        folder = tmp_path / first
        folder.mkdir()
        begun, _ = nanogpt(folder, scripts[first], "--stop-at=10")
        assert "step 10: " in begun
        made[first] = nanogpt(folder, scripts[second], "--resume")
    assert_same_losses(made["ours"][0], made["plain"][0])
    assert_same_weights(made["ours"][1], made["plain"][1], 1e-5)


@pytest.mark.slow
def test_nanogpt_on_two_ranks_trains_as_on_one(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    said = run(tmp_path, *launch, str(EXAMPLES / "nanogpt.py"), "--iters=12", "--eval-interval=6")
    plain = run(tmp_path, str(PLAIN / "nanogpt.py"), "--iters=12", "--eval-interval=6")
    assert_same_losses("\n".join(re.findall("^step .*$", said, re.MULTILINE)),
                       "\n".join(re.findall("^step .*$", plain, re.MULTILINE)))  # fmt: skip


def trained(folder: Path, script: str, kind: str, *options: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses that a Trainer has logged, and the weights that the script saved."""
    folder.mkdir(exist_ok=True)
    run(folder, str((EXAMPLES if kind == "ours" else PLAIN) / script), "--out=made", *options)
    newest = max((folder / "made").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    entries = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    assert ("tidegate_verdict" in [*entries[-2], *entries[-1]]) == (kind == "ours")
    losses = [loss for entry in entries for name, loss in entry.items() if name in ("loss", "eval_loss")]
    (weights,) = (folder / "made").glob("[am]*/*model.safetensors")
    return losses, load_file(weights)


@pytest.mark.slow
def test_lora_with_the_trainer_trains_alike_and_each_resumes_from_the_other(tmp_path: Path) -> None:
    made = {
        kind: trained(tmp_path / kind, "trainer_lora.py", kind, "--steps=30") for kind in ("ours", "plain")
    }  # fmt: skip
    assert made["ours"][0] == pytest.approx(made["plain"][0], abs=1e-4)
    assert_same_weights(made["ours"][1], made["plain"][1], 1e-5)
    assert any("lora_A" in name for name in made["ours"][1])
    for kind in ("ours", "plain"):
        for newest in (tmp_path / kind / "made").glob("checkpoint-30"):
            shutil.rmtree(newest)
    resumed = {
        kind: trained(tmp_path / other, "trainer_lora.py", kind, "--steps=30", "--resume")
        for kind, other in (("ours", "plain"), ("plain", "ours"))
    }
    for kind in ("ours", "plain"):
        assert_same_weights(resumed[kind][1], made[kind][1], 1e-5)


def lightning(folder: Path, kind: str, *options: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses in the logger's file, and the weights of the last checkpoint."""
    folder.mkdir(exist_ok=True)
    script = (EXAMPLES if kind == "ours" else PLAIN) / "lightning_module.py"
    run(folder, str(script), "--out=made", "--steps=20", *options)
    log = folder / "made" / ("resumed" if "--resume" in options else "begun") / "metrics.csv"
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert ("tidegate_verdict" in rows[0]) == (kind == "ours")
    losses = [float(row[name]) for row in rows for name in ("train_loss", "val_loss") if row.get(name)]
    return losses, torch.load(folder / "made" / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.mark.slow
def test_lightning_trains_alike_and_each_resumes_from_the_other(tmp_path: Path) -> None:
    made = {}
    for first, second in (("ours", "plain"), ("plain", "ours")):
        begun = lightning(tmp_path / first, first, "--stop-at=10")
        made[first] = begun, lightning(tmp_path / first, second, "--resume")
    for ours, plain in zip(made["ours"], made["plain"], strict=True):
        assert ours[0] == pytest.approx(plain[0], abs=1e-4)
        assert_same_weights(ours[1], plain[1], 1e-5)


def accelerated(folder: Path, kind: str, *options: str) -> tuple[str, dict[str, torch.Tensor]]:
    folder.mkdir(exist_ok=True)
    script = (EXAMPLES if kind == "ours" else PLAIN) / "accelerate_loop.py"
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1"]
    said = run(folder, *launch, "--mixed_precision=no", "--dynamo_backend=no", str(script), *options)
    return said, load_file(folder / "accelerate-loop" / "model.safetensors")


@pytest.mark.slow
def test_accelerate_trains_alike_and_each_resumes_from_the_other(tmp_path: Path) -> None:
    made = {}
    for first, second in (("ours", "plain"), ("plain", "ours")):
        begun = accelerated(tmp_path / first, first, "--stop-at=10")
        made[first] = begun, accelerated(tmp_path / first, second, "--resume")
    for ours, plain in zip(made["ours"], made["plain"], strict=True):
        assert_same_losses(ours[0], plain[0])
        assert_same_weights(ours[1], plain[1], 1e-5)
    assert "step 30: " in made["ours"][1][0]


@pytest.mark.slow
def test_sft_with_trl_trains_alike_and_resumes(tmp_path: Path) -> None:
    made = {kind: trained(tmp_path / kind, "trl_sft.py", kind) for kind in ("ours", "plain")}
    assert made["ours"][0] == pytest.approx(made["plain"][0], abs=1e-4)
    assert_same_weights(made["ours"][1], made["plain"][1], 1e-5)
    shutil.rmtree(tmp_path / "plain" / "made" / "checkpoint-30")
    assert_same_weights(trained(tmp_path / "plain", "trl_sft.py", "ours", "--resume")[1], made["ours"][1], 1e-5)
