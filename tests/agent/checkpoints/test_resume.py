"""Checkpoints resume in any other cut, and what does not fit is refused before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tidegate
from tests.agent.checkpoints.saving import SIZES, WAYS, Run, both, flip, names_in, other_ways, repack
from tests.agent.plain_adamw import WEIGHT_DTYPES
from tests.examples import examples
from tidegate.agent.checkpoints.discovery import find_checkpoints
from tidegate.agent.checkpoints.manifest import Manifest
from tidegate.errors import (
    BlockDamaged,
    ConfigError,
    DataTruncated,
    EngineError,
    FileDamaged,
    ForeignRun,
    ForeignState,
    HeaderDamaged,
    ManifestDamaged,
    NewerFormat,
    NoCheckpoint,
    WeightsMismatch,
    WrongStep,
)

# ---- resuming


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("saved", ["the same", "no paths"])
def test_resumes_in_any_other_way(tmp_path: Path, disk: Path, memory: Path, dtype: torch.dtype, saved: str) -> None:
    ways = other_ways(disk, memory)
    with Run(dtype, **ways[saved]) as run:
        run.steps(0, 4)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        middle = [param.detach().clone() for param in run.params], deepcopy(run.plain)
        run.steps(4, 7)
    for way in WAYS:
        with Run(dtype, **ways[way]) as other:
            for param, weight in zip(other.params, middle[0], strict=True):
                param.data.copy_(weight)
            other.plain = deepcopy(middle[1])
            found = other.optimizer.load_checkpoint(tmp_path / "saved")
            assert (found.step, other.optimizer.num_steps) == (4, 4)
            other.steps(4, 7)
            assert all(map(torch.equal, run.params, other.params)), way


@given(
    first=st.integers(1, 8000), second=st.integers(1, 8000), sizes=st.lists(st.integers(0, 900), min_size=1, max_size=6)
)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_becomes_any_other(
    tmp_path_factory: pytest.TempPathFactory, first: int, second: int, sizes: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("any")
    params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    states = []
    for numel in (max(first, 20), max(second, 20)):
        with tidegate.AdamW(params, offload=tidegate.Offload(subgroup_numel=numel, cpu_threads=1)) as optimizer:
            if not states:
                for param in params:
                    param.grad = torch.randn_like(param)
                optimizer.step()
                optimizer.save_checkpoint(directory)
            else:
                optimizer.load_checkpoint(directory)
            states.append(optimizer.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_param_groups_and_steps_come_back(tmp_path: Path) -> None:
    params = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(7)), torch.nn.Parameter(torch.ones(2))]
    groups = [
        {"params": params[:1], "lr": torch.tensor(0.5), "mine": (1, 2)},
        {"params": params[1:], "betas": (0, 0.5)},
    ]
    with tidegate.AdamW(groups, lr=0.1) as optimizer:
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
        for present in ([0, 1], [1], [1]):
            for i in present:
                params[i].grad = torch.ones_like(params[i])
            optimizer.step()
            optimizer.zero_grad()
        optimizer.save_checkpoint(tmp_path)
        expected = optimizer.state_dict()
    with tidegate.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=9.0) as optimizer:
        optimizer.load_checkpoint(tmp_path)
        found = optimizer.state_dict()
        assert set(found["state"]) == {0, 1}, "the third was never updated"
        assert [float(found["state"][i]["step"]) for i in (0, 1)] == [1, 3]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert optimizer.param_groups[0]["mine"] == (1, 2)
        assert optimizer.param_groups[0]["initial_lr"] == 0.5


def test_what_a_checkpoint_cannot_hold_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    param = torch.nn.Parameter(torch.ones(5))
    with tidegate.AdamW([{"params": [param], "mine": Path("x")}]) as optimizer:
        with pytest.raises(ConfigError, match="plain values"):
            optimizer.save_checkpoint(tmp_path)
        assert names_in(tmp_path) == []
        with pytest.raises(ConfigError, match="keep=0"):
            optimizer.save_checkpoint(tmp_path, keep=0)
        for keep in (1.5, "2", None):
            with pytest.raises(ConfigError, match=rf"keep={keep!r} is not a whole number: .* at least 1"):
                optimizer.save_checkpoint(tmp_path, keep=keep)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="keep="):
                optimizer.begin_checkpoint(tmp_path, keep=keep)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"memory_bytes='9' is not a whole number: .* at least 0"):
            optimizer.begin_checkpoint(tmp_path, memory_bytes="9")  # type: ignore[arg-type]
        assert names_in(tmp_path) == []


def test_to_torchs_adamw_and_back(tmp_path: Path, disk: Path, memory: Path) -> None:
    """The state goes through torch's optimizer and a native checkpoint, both ways."""
    with Run(**both(disk, memory)) as run:
        run.steps(0, 3)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        theirs = [torch.nn.Parameter(param.detach().clone()) for param in run.params]
        native = run.optimizer.state_dict()
    with Run(like=run) as exporter:
        exporter.optimizer.load_checkpoint(tmp_path / "saved")
        exported = exporter.optimizer.state_dict()
    torch.testing.assert_close(exported, native, rtol=0, atol=0)
    reference = torch.optim.AdamW(theirs, lr=0.1)
    reference.load_state_dict(exported)
    for step in range(3):
        for param in theirs:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        reference.step()
    with Run(**both(disk, memory)) as back:
        for param, weight in zip(back.params, theirs, strict=True):
            param.data.copy_(weight.data)
        back.optimizer.load_state_dict(reference.state_dict())
        back.optimizer.save_checkpoint(tmp_path / "back")
    with Run(like=back) as last:
        last.optimizer.load_checkpoint(tmp_path / "back")
        found = last.optimizer.state_dict()["state"]
    for index, values in reference.state_dict()["state"].items():
        torch.testing.assert_close(found[index], values, rtol=0, atol=0)


def test_torchs_distributed_checkpoint_saves_and_loads_tiered_state(tmp_path: Path, disk: Path, memory: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 3))

    def tiered() -> tidegate.AdamW:
        offload = tidegate.Offload(subgroup_numel=200, cpu_threads=1, **both(disk, memory, host_cache=2000))
        return tidegate.AdamW(model.parameters(), offload=offload)

    with tiered() as optimizer:
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = optimizer.state_dict()
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "dcp")
    with tiered() as optimizer:
        loaded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        # DCP fills in what is there: a fresh optimizer has no moments yet.
        optimizer.load_state_dict({**expected, "state": {
            i: {name: torch.zeros_like(value) for name, value in state.items()} | {"step": torch.tensor(1.0)}
            for i, state in expected["state"].items()
        }})  # fmt: skip
        loaded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        torch.testing.assert_close(optimizer.state_dict(), expected, rtol=0, atol=0)


# ---- refused


@pytest.fixture
def saved(tmp_path: Path, disk: Path) -> Iterator[tuple[Run, tidegate.Checkpoint]]:
    with Run(paths={"disk": disk}, host_cache=0, subgroup_numel=3000) as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(tmp_path / "other")
        run.steps(1, 2)
        yield run, run.optimizer.save_checkpoint(tmp_path / "saved")


def other_step(checkpoint: tidegate.Checkpoint) -> Path:
    (older,) = find_checkpoints(checkpoint.directory.parent.parent / "other")
    return older.folder / "000001.tide"


DAMAGE: dict[str, tuple[Any, type[Exception]]] = {
    "a block": (lambda c: flip(c.folder / "000001.tide", 5000), BlockDamaged),
    "a header": (lambda c: flip(c.folder / "000001.tide", 30), HeaderDamaged),
    "short": (lambda c: os.truncate(c.folder / "000001.tide", 9000), DataTruncated),
    "missing": (lambda c: (c.folder / "000001.tide").unlink(), DataTruncated),
    "of another step": (lambda c: os.replace(other_step(c), c.folder / "000001.tide"), WrongStep),
    "of another subgroup": (lambda c: os.replace(c.folder / "000000.tide", c.folder / "000001.tide"), DataTruncated),
    "the manifest": (lambda c: flip(c.directory / "rank0.json", 100), ManifestDamaged),
    "no manifest": (lambda c: (c.directory / "rank0.json").unlink(), NoCheckpoint),
    "param groups": (lambda c: flip(c.folder / "optimizer.pt", 100), FileDamaged),
    "no param groups": (lambda c: (c.folder / "optimizer.pt").unlink(), DataTruncated),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(saved: tuple[Run, tidegate.Checkpoint], name: str) -> None:
    run, checkpoint = saved
    damage, error = DAMAGE[name]
    sound = run.optimizer.state_dict()  # what is damaged is, where it is linked, the run's own file
    damage(checkpoint)
    with Run(like=run) as other:
        with pytest.raises(error):
            other.optimizer.load_checkpoint(checkpoint.directory.parent)
        if error is not BlockDamaged:
            assert other.optimizer.state_dict()["state"] == {}, "nothing was changed"
            return
        with pytest.raises(EngineError, match="loading its state failed: BlockDamaged"):
            other.optimizer.state_dict()
        other.optimizer.load_state_dict(sound)
        other.steps(2, 4)


def test_a_damaged_checkpoint_keeps_nobody_from_saving(saved: tuple[Run, tidegate.Checkpoint]) -> None:
    run, checkpoint = saved
    flip(checkpoint.directory / "rank0.json", 100)
    run.steps(2, 3)
    run.optimizer.save_checkpoint(checkpoint.directory.parent)
    assert checkpoint.folder.is_dir(), "it is for people to look at"


def test_files_of_another_run_are_refused(saved: tuple[Run, tidegate.Checkpoint], tmp_path: Path) -> None:
    run, checkpoint = saved
    with Run(like=run, subgroup_numel=3000) as other:
        made = other.optimizer.save_checkpoint(tmp_path / "third")
    os.replace(made.folder / "000001.tide", checkpoint.folder / "000001.tide")
    with Run(like=run) as other, pytest.raises(ForeignRun):
        other.optimizer.load_checkpoint(checkpoint.directory.parent)


def test_other_weights_are_refused(saved: tuple[Run, tidegate.Checkpoint]) -> None:
    run, checkpoint = saved
    with Run(like=run) as other:
        other.params[3].data[4000] += 1e-6
        with pytest.raises(WeightsMismatch, match="Load weights and state of the same checkpoint"):
            other.optimizer.load_checkpoint(checkpoint.directory.parent)
        assert other.optimizer.state_dict()["state"] == {}


def test_other_models_are_refused(saved: tuple[Run, tidegate.Checkpoint]) -> None:
    _, checkpoint = saved
    for shapes, dtype, what in [
        (SIZES[:3], torch.float32, "4 parameters"),
        ((3000, 500, 78, 4096), torch.float32, "parameter 2"),
        (SIZES, torch.bfloat16, "parameter 0"),
    ]:
        params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        with tidegate.AdamW(params) as other, pytest.raises(ForeignState, match=what):
            other.load_checkpoint(checkpoint.directory.parent)


def test_what_is_not_there_is_said(saved: tuple[Run, tidegate.Checkpoint], tmp_path: Path) -> None:
    run, checkpoint = saved
    with pytest.raises(NoCheckpoint, match="steps there: none"):
        run.optimizer.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(NoCheckpoint, match=r"of step 7 .* steps there: 2"):
        run.optimizer.load_checkpoint(checkpoint.directory.parent, step=7)
    assert tidegate.find_checkpoints(tmp_path / "nothing") == []


def test_manifests_come_back_as_they_were(saved: tuple[Run, tidegate.Checkpoint], tmp_path: Path) -> None:
    manifest = saved[1].manifest
    assert Manifest.unpack(manifest.pack(), Path("f")) == manifest
    (tmp_path / "newer").write_bytes(manifest.pack())
    repack(tmp_path / "newer", version=4)
    with pytest.raises(NewerFormat):
        Manifest.unpack((tmp_path / "newer").read_bytes(), Path("f"))
    for data in (b"", b"[]", b'{"crc32": 1}', b'{"crc32": 1, "checkpoint": 3}', manifest.pack()[:-9]):
        with pytest.raises(ManifestDamaged):
            Manifest.unpack(data, Path("f"))
