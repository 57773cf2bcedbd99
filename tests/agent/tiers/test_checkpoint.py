"""Checkpoints: resumed in any other cut, never written to again, gone only when a newer one is complete."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
from tests.agent.plain import PlainAdamW
from tidegate.agent.tiers import drain as draining
from tidegate.agent.tiers import spares
from tidegate.agent.tiers.manifest import Manifest, find_checkpoints
from tidegate.agent.tiers.resume import read_header
from tidegate.errors import (
    BlockDamaged,
    CheckpointFailed,
    ConfigError,
    DataTruncated,
    EngineError,
    ForeignRun,
    ForeignState,
    HeaderDamaged,
    ManifestDamaged,
    NewerFormat,
    NoCheckpoint,
    PathFull,
    WeightsMismatch,
    WrongStep,
)

SIZES = (3000, 500, 77, 4096)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Run:
    """An optimizer beside the oracle, which has its weights after each step."""

    def __init__(self, dtype: torch.dtype = torch.float32, like: Run | None = None, **offload: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]
        if like is not None:
            for mine, theirs in zip(self.params, like.params, strict=True):
                mine.data.copy_(theirs.data)
        chosen: dict[str, Any] = {"stride": 2.0, "subgroup_numel": 600, "cpu_threads": 1, **offload}
        self.optimizer = tidegate.AdamW(self.params, lr=0.1, max_grad_norm=1.0, offload=tidegate.Offload(**chosen))
        self.plain = PlainAdamW([dict(group) for group in self.optimizer.param_groups], 1.0)
        if like is not None:
            self.plain = deepcopy(like.plain)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.params]
            for param, grad in zip(self.params, grads, strict=True):
                (param * grad).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.plain.step(list(grads))
            assert self.plain.same_weights(self.params), step

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.optimizer.close()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as directory:
        yield Path(directory)


def both(disk: Path, memory: Path, **changes: Any) -> dict[str, Any]:
    """Some state in files on the disk, some in memory, some cached, some on the device."""
    paths = {"disk": disk, "memory": memory}
    return {"paths": paths, "tier_split": "disk:2,memory:1", "host_cache": 8000, "static_ratio": 0.1, **changes}


def other_ways(disk: Path, memory: Path) -> dict[str, dict[str, Any]]:
    (disk / "second").mkdir(exist_ok=True)
    three = {"a": disk, "b": disk / "second", "c": memory}
    return {
        "the same": both(disk, memory),
        "larger subgroups, nothing cached": both(disk, memory, subgroup_numel=1777, host_cache=0, static_ratio=0.0),
        "three paths": both(disk, memory, paths=three, tier_split="a:1,b:2,c:1", stride="off"),
        "one path": {"paths": {"disk": disk}, "host_cache": 0, "stride": 3.0, "subgroup_numel": 77},
        "no paths": {"stride": 1.0, "subgroup_numel": 5000},
    }


WAYS = ("the same", "larger subgroups, nothing cached", "three paths", "one path", "no paths")


# ---- resuming


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        assert os.listdir(tmp_path) == []
        with pytest.raises(ConfigError, match="keep=0"):
            optimizer.save_checkpoint(tmp_path, keep=0)


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


# ---- files


def files_of(checkpoint: tidegate.Checkpoint) -> list[Path]:
    return sorted(checkpoint.folder.glob("*.tide"))


def state_files(checkpoint: tidegate.Checkpoint) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files_of(checkpoint)}


def links(checkpoint: tidegate.Checkpoint) -> list[int]:
    return [path.stat().st_nlink for path in files_of(checkpoint)]


def test_files_are_linked_where_they_can_be_and_never_written_to_again(
    tmp_path: Path, disk: Path, memory: Path
) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        lives = list(run.optimizer.engine.memory.residence)
        first = run.optimizer.save_checkpoint(tmp_path / "saved", keep=3)
        assert {"disk", "memory", "host", "device"} == set(lives)
        assert links(first) == [2 if place == "disk" else 1 for place in lives]
        before = state_files(first)
        run.steps(2, 4)
        second = run.optimizer.save_checkpoint(tmp_path / "saved", keep=3)
        again = run.optimizer.save_checkpoint(tmp_path / "saved", keep=3)
        run.steps(4, 6)
        assert state_files(first) == before
        assert state_files(second) == state_files(again)
        assert again.directory.name == "step-4.3"
        assert run.optimizer.engine.store.last_checkpoint == str(again.directory)
        assert [found.directory for found in find_checkpoints(tmp_path / "saved")] == [
            again.directory, second.directory, first.directory
        ]  # fmt: skip


def test_linked_state_whose_weights_were_edited_is_copied(tmp_path: Path, disk: Path) -> None:
    """The file of an earlier checkpoint holds the same state, but says that it belongs to other weights."""
    with Run(paths={"disk": disk}, host_cache=0) as run:
        run.steps(0, 2)
        first = run.optimizer.save_checkpoint(tmp_path / "saved", keep=2)
        before, touched = state_files(first), [path.stat().st_mtime_ns for path in files_of(first)]
        run.params[0].data.mul_(2)
        second = run.optimizer.save_checkpoint(tmp_path / "saved", keep=2)
        assert state_files(first) == before
        assert [path.stat().st_mtime_ns for path in files_of(first)] == touched, "not even by the same bytes"
        assert min(links(second)) == 1, "those of the edited weight"
        assert max(links(second)) == 3, "the others"
        with Run(like=run) as other:
            other.optimizer.load_checkpoint(tmp_path / "saved")


def test_expired_files_become_spares(tmp_path: Path, disk: Path) -> None:
    """A path needs (1 + kept checkpoints) times its share, whatever the number of checkpoints that were made."""
    with Run(paths={"disk": disk}, host_cache=0) as run:
        inodes, keep = [], 2
        count = len(run.optimizer.engine.layouts)
        for round_ in range(5):
            run.steps(round_, round_ + 1)
            run.optimizer.save_checkpoint(tmp_path / "saved", keep=keep)
            files = [*disk.rglob("*.tide"), *(tmp_path / "saved").rglob("*.tide")]
            inodes.append({path.stat().st_ino for path in files})
        assert [len(some) for some in inodes] == [2 * count, 3 * count, 3 * count, 3 * count, 3 * count]
        assert inodes[2] == inodes[3] == inodes[4]
        assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [5, 4]
        run.steps(5, 7)


def test_scratch_goes_and_the_checkpoint_stays(tmp_path: Path, disk: Path, memory: Path) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        made = run.optimizer.save_checkpoint(tmp_path / "saved")
        (_, *_) = disk.iterdir()
    assert list(disk.iterdir()) == [] == list(memory.iterdir())
    assert set(links(made)) == {1}
    header = read_header(made.folder / "000000.tide")
    assert header.step == 2


def test_what_the_user_saves_too_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    with Run() as run:
        run.steps(0, 1)
        made = run.optimizer.save_checkpoint(tmp_path, save_also=lambda at: torch.save(run.params, at / "weights.pt"))
        assert (made.folder / "weights.pt").exists()
        assert find_checkpoints(tmp_path)[0].folder == made.folder

        def fail(_: Path) -> None:
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            run.optimizer.save_checkpoint(tmp_path, save_also=fail)
        assert os.listdir(tmp_path) == ["step-1"]
        run.steps(1, 2)
        run.optimizer.save_checkpoint(tmp_path)
        assert os.listdir(tmp_path) == ["step-2"]


# ---- interrupted


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_an_interrupted_save_leaves_the_one_before(
    tmp_path: Path, disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """As a crash: from some call to the system on, none is made any more, not even to clean up."""
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        middle = [param.detach().clone() for param in run.params], deepcopy(run.plain)
        run.steps(2, 4)
        with monkeypatch.context() as patch:
            calls = iter(range(10_000))
            for module, name in [
                (os, "fsync"),
                (os, "link"),
                (os, "rename"),
                (os, "unlink"),
                (draining.shutil, "rmtree"),
            ]:
                real = getattr(module, name)

                def counted(*args: Any, real: Any = real, **options: Any) -> Any:
                    if next(calls) >= moment:
                        raise Interrupted
                    return real(*args, **options)

                patch.setattr(module, name, counted)
            try:
                run.optimizer.save_checkpoint(tmp_path / "saved")
            except Interrupted:
                newest = find_checkpoints(tmp_path / "saved")[0].step
            else:
                newest = 4
        assert newest in (2, 4)
        with Run(like=run, **both(disk, memory)) as other:
            if newest == 2:
                for param, weight in zip(other.params, middle[0], strict=True):
                    param.data.copy_(weight)
                other.plain = deepcopy(middle[1])
            assert other.optimizer.load_checkpoint(tmp_path / "saved").step == newest
            other.steps(newest, 6)
            other.optimizer.save_checkpoint(tmp_path / "saved")
        assert os.listdir(tmp_path / "saved") == ["step-6"]


def test_all_is_on_the_disk_before_the_manifest_is(
    tmp_path: Path, disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no test can cut the power for: every file and directory is synchronised, then the manifest is renamed, then
    its directory is synchronised."""
    order: list[str] = []
    sync, rename = os.fsync, os.rename

    def noted_sync(fd: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    def noted_rename(source: Any, target: Any) -> None:
        order.append(f"{source} to {target}")
        rename(source, target)

    saved = tmp_path / "saved"
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        monkeypatch.setattr(os, "fsync", noted_sync)
        monkeypatch.setattr(os, "rename", noted_rename)
        made = run.optimizer.save_checkpoint(saved, save_also=lambda at: (at / "mine").write_text("x"))
        monkeypatch.undo()
    new, manifest = made.directory / "rank0.new", made.directory / "rank0.json"
    moment = order.index(f"{new} to {manifest}")
    wanted = {saved, made.directory, made.folder, *made.folder.iterdir(), new}
    assert set(map(Path, order[:moment])) >= wanted
    assert {"mine", "optimizer.pt", "000000.tide"} <= {path.name for path in wanted}
    assert order[moment + 1] == str(made.directory)


def test_a_save_that_fails_changes_nothing(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(paths={"disk": disk}, host_cache=0) as run:
        run.steps(0, 2)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        run.steps(2, 3)

        def refused(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(draining, "publish", refused)
            with pytest.raises(CheckpointFailed, match=r"step-3 cannot be written: .*Input/output error"):
                run.optimizer.save_checkpoint(tmp_path / "saved")
        assert os.listdir(tmp_path / "saved") == ["step-2"]
        run.steps(3, 5)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        assert os.listdir(tmp_path / "saved") == ["step-5"]


def test_no_room_is_said_when_it_is_saved(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(paths={"disk": disk}, host_cache=0, stride="off") as run:
        run.steps(0, 2)
        monkeypatch.setattr(spares, "free_bytes", lambda _: 100_000)
        with pytest.raises(PathFull, match="100,000 are free") as caught:
            run.optimizer.save_checkpoint(tmp_path / "saved")
        files = len(run.optimizer.engine.layouts)
        # 600 parameters of 8 bytes are two pages, and a header; the last subgroup is smaller.
        assert caught.value.needed_bytes == (files - 1) * 3 * 4096 + 2 * 4096
        assert list((tmp_path / "saved").iterdir()) == []
        assert not any(run.optimizer.engine.store.paths["disk"].has_spare(s) for s in range(files))
        run.steps(2, 4)


def test_spares_count_against_the_capacity_of_a_path(tmp_path: Path, disk: Path) -> None:
    settings_ = tidegate.PathSettings(directory=disk, capacity_bytes=300_000)
    with Run(paths={"disk": settings_}, host_cache=0, stride="off") as run:
        run.steps(0, 1)
        with pytest.raises(PathFull, match="of what is on path disk needs 155,648 bytes more, 144,352 are free"):
            run.optimizer.save_checkpoint(tmp_path / "saved")
        run.steps(1, 2)


FULL_DISK = """
import sys, torch, tidegate
from pathlib import Path
from tidegate.errors import PathFull
at = Path(sys.argv[1])
(at / "tide").mkdir()
params = [torch.nn.Parameter(torch.ones(600_000))]
offload = tidegate.Offload(paths={"tiny": at / "tide"}, host_cache=0, subgroup_numel=100_000, stride="off")
with tidegate.AdamW(params, offload=offload) as optimizer:
    def step():
        params[0].grad = torch.ones(600_000)
        optimizer.step()
    step()
    if sys.argv[2] == "room":
        for _ in range(4):
            optimizer.save_checkpoint(at / "saved")
            step()
            step()
    else:
        try:
            optimizer.save_checkpoint(at / "saved")
        except PathFull as error:
            print("refused:", error)
        else:
            raise SystemExit("there was no room")
        step()
print("done")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("megabytes", "expected"), [(12, "room"), (9, "none")])
def test_on_a_file_system_with_little_room(tmp_path: Path, megabytes: int, expected: str) -> None:
    """4.8 MB of state, and as much for one checkpoint: it goes on for ever in 12 MB, and is refused in 9."""
    mounted = f'mount -t tmpfs -o size={megabytes}m tmpfs "$0" && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, str(tmp_path),
         sys.executable, "-c", FULL_DISK, str(tmp_path), expected],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("done\n")
    assert ("refused:" in done.stdout) == (expected == "none"), done.stdout


# ---- refused


@pytest.fixture
def saved(tmp_path: Path, disk: Path) -> Iterator[tuple[Run, tidegate.Checkpoint]]:
    with Run(paths={"disk": disk}, host_cache=0, subgroup_numel=3000) as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(tmp_path / "other")
        run.steps(1, 2)
        yield run, run.optimizer.save_checkpoint(tmp_path / "saved")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


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
    "param groups": (lambda c: flip(c.folder / "optimizer.pt", 100), ManifestDamaged),
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


def test_manifests_come_back_as_they_were(saved: tuple[Run, tidegate.Checkpoint]) -> None:
    manifest = saved[1].manifest
    assert Manifest.unpack(manifest.pack(), Path("f")) == manifest
    newer = manifest.pack().replace(b'"version": 1', b'"version": 2')
    with pytest.raises(NewerFormat):
        Manifest.unpack(newer, Path("f"))
    for data in (b"", b"[]", b'{"crc32": 1}', b'{"crc32": 1, "checkpoint": 3}', manifest.pack()[:-9]):
        with pytest.raises(ManifestDamaged):
            Manifest.unpack(data, Path("f"))
