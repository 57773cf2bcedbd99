"""Every example runs, from nothing and from what it left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.documented import blocks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(folder: Path, *command: str, seconds: float = 250) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def loss_of(said: str) -> float:
    return float(re.findall(r"loss ([\d.]+)", said)[-1])


@pytest.mark.slow
def test_plain_pytorch_resumes_where_it_was(tmp_path: Path) -> None:
    first = run(tmp_path, str(EXAMPLES / "plain_pytorch.py"))
    second = run(tmp_path, str(EXAMPLES / "plain_pytorch.py"))
    assert "steps 0 to 20" in first
    assert "steps 20 to 40" in second
    assert loss_of(second) < loss_of(first)
    counts = dict(re.findall(r"(nvme|pfs):(\d+)", second))
    assert int(counts["nvme"]) > 0
    assert int(counts["pfs"]) > 0


@pytest.mark.slow
def test_plain_pytorch_takes_the_newest_of_several_checkpoints(tmp_path: Path) -> None:
    """Readers keep more of them than the example does."""
    run(tmp_path, str(EXAMPLES / "plain_pytorch.py"))
    (older,) = (tmp_path / "plain-pytorch" / "checkpoints").glob("step-*")
    shutil.copytree(older, tmp_path / "kept")
    run(tmp_path, str(EXAMPLES / "plain_pytorch.py"))
    shutil.copytree(tmp_path / "kept", older)
    assert "steps 40 to 60" in run(tmp_path, str(EXAMPLES / "plain_pytorch.py"))


@pytest.mark.slow
def test_ddp_resumes_all_ranks_with_and_without_a_scaler(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLES / "ddp.py")]
    first = run(tmp_path, *launch)
    second = run(tmp_path, *launch, "--dtype=float16")
    assert "2 ranks, steps 0 to 10" in first
    assert "2 ranks, steps 10 to 20" in second
    assert loss_of(second) < loss_of(first)
    for step in (10, 20):
        of_first, of_second = sorted((tmp_path / "ddp" / "checkpoints" / f"step-{step}").glob("rank*-*"))
        assert [file.name for file in of_first.glob("model.pt")] == ["model.pt"]
        assert not list(of_second.glob("model.pt")), "only rank 0 saves the weights"
        sizes = [sum(file.stat().st_size for file in part.glob("*.tide")) for part in (of_first, of_second)]
        assert sizes[0] == sizes[1] > 0, "every rank has the whole state"
    assert not list((tmp_path / "ddp" / "nvme").iterdir()), "the files of a run go with it"


def test_the_page_has_the_program_of_the_ddp_example() -> None:
    (written,) = blocks("frameworks", "DDP")
    assert textwrap.indent(written, "    ") in (EXAMPLES / "ddp.py").read_text()


@pytest.mark.slow
def test_fsdp2_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    said = [
        run(
            tmp_path, *["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"],
            str(EXAMPLES / "fsdp2.py"),
        )
        for ranks in (2, 3)
    ]  # fmt: skip
    assert said[0].startswith("2 ranks")
    assert said[1].startswith("3 ranks")
    assert loss_of(said[1]) < loss_of(said[0])


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_deepspeed_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # DeepSpeed compiles its kernels first, once per machine, while other tests take both processors.
    first = run(tmp_path, *launch, str(EXAMPLES / "deepspeed_json.py"), seconds=900)
    second = run(tmp_path, *launch, str(EXAMPLES / "deepspeed_json.py"))
    assert "steps 0 to 20" in first
    assert "steps 20 to 40" in second
    assert loss_of(second) < loss_of(first)
    counts = {name: int(count) for name, count in re.findall(r"(nvme|pfs):(\d+)", second)}
    assert counts["nvme"] > counts["pfs"] > 0


@pytest.mark.slow
def test_the_trainer_says_what_holds_it_up(tmp_path: Path) -> None:
    said = run(tmp_path, str(EXAMPLES / "huggingface_trainer.py"))
    assert "steps 20" in said
    assert "the update took" in said


def test_the_readme_of_the_examples_names_each() -> None:
    named = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert named == {path.name for path in EXAMPLES.glob("*.py")}
