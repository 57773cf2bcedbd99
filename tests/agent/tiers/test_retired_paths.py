"""Scratch goes with whoever made it, closed or not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST
from tests.agent.optimizer.test_optimizer import params_of, run_steps
from tidegate.agent.engine import engine

TRAINS = """
import sys, torch, tidegate
param = torch.nn.Parameter(torch.zeros(100))
offload = tidegate.Offload(subgroup_numel=10, paths={"nvme": sys.argv[1]}, host_cache=0)
optimizer = tidegate.AdamW([param], offload=offload)
param.sum().backward()
optimizer.step()
assert next(__import__("pathlib").Path(sys.argv[1]).glob("tidegate-*/rank0/*"))
"""


def stored(directory: Path) -> tidegate.Offload:
    return tidegate.Offload(subgroup_numel=50, emulated=FAST, paths={"nvme": directory}, host_cache=0)


def test_an_optimizer_that_nobody_holds_leaves_nothing(tmp_path: Path) -> None:
    params = params_of((400,))
    optimizer = tidegate.AdamW(params, offload=stored(tmp_path))
    run_steps(optimizer, params, 0, 2)
    assert list(tmp_path.iterdir())
    del optimizer
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_program_that_ends_without_close_leaves_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", TRAINS, tmp_path], check=True, timeout=120)
    assert not list(tmp_path.iterdir())


def test_a_constructor_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken on purpose")

    monkeypatch.setattr(engine, "WeightEdits", broken)
    with pytest.raises(ValueError, match="on purpose"):
        tidegate.AdamW(params_of((400,)), offload=stored(tmp_path))
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_fork_leaves_what_is_its_parents(tmp_path: Path) -> None:
    params = params_of((400,))
    with tidegate.AdamW(params, offload=stored(tmp_path)) as optimizer:
        run_steps(optimizer, params, 0, 1)
        files = sorted(tmp_path.rglob("*.tide"))
        child = os.fork()
        if child == 0:
            try:
                optimizer.close()
                del optimizer
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert sorted(tmp_path.rglob("*.tide")) == files
        run_steps(optimizer, params, 1, 1)
    assert torch.isfinite(params[0]).all()
