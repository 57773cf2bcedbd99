"""One flipped bit anywhere in a checkpoint: an error with a name, or the very same state; never another one."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tidegate
from tests.agent.checkpoints.saving import Run, both
from tidegate.agent.ranks import Ranks
from tidegate.errors import StorageError

SPAWN = mp.get_context("spawn")
OTHER_CUT: dict[str, Any] = {"stride": "off", "subgroup_numel": 5000}
KINDS = ("manifest", "optimizer.pt", "saved files", "state")


@dataclass
class Part:
    """What one rank has in a checkpoint."""

    rank: int
    weights: list[torch.Tensor]
    state: dict[str, Any]
    reader: Run
    """It loads the checkpoint again and again."""

    def load(self, directory: Path) -> str:
        """As the documentation says: checked, weights loaded, state loaded."""
        optimizer = self.reader.optimizer
        try:
            found = tidegate.find_checkpoints(directory, self.rank)
            if not found:
                optimizer.load_checkpoint(directory)
                raise AssertionError("it was loaded and is not listed")
            found[0].verify()
            for param, weight in zip(self.reader.params, torch.load(found[0].folder / "model.pt"), strict=True):
                param.data.copy_(weight)
            optimizer.load_checkpoint(directory)
        except StorageError as error:
            return type(error).__name__
        try:
            torch.testing.assert_close(optimizer.state_dict(), self.state, rtol=0, atol=0)
            assert all(map(torch.equal, self.weights, self.reader.params))
            assert optimizer.num_steps == 3
        except AssertionError:
            return "UNDETECTED"
        return "equal state"


@dataclass
class Campaign:
    """A checkpoint, what is in it, and what came of flips in it."""

    checkpoint: tidegate.Checkpoint
    parts: Sequence[Part]
    """Of all ranks."""
    came: Counter[tuple[str, str]] = field(default_factory=Counter)

    def files(self) -> dict[str, list[Path]]:
        """All there are, by kind."""
        found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
        for path in sorted(self.checkpoint.directory.rglob("*")):
            if path.is_file():
                kind = {".json": "manifest", ".tide": "state"}.get(path.suffix, "saved files")
                found[path.name if path.name in KINDS else kind].append(path)
        return found

    def flip(self, kind: str, path: Path, bit: int) -> None:
        """Turns it over, sees what comes of it, and turns it back."""
        fd = os.open(path, os.O_RDWR)
        try:
            before = os.pread(fd, 1, bit // 8)
            os.pwrite(fd, bytes([before[0] ^ 1 << bit % 8]), bit // 8)
            came = self.load()
            os.pwrite(fd, before, bit // 8)
        finally:
            os.close(fd)
        self.came[kind, came] += 1
        assert came != "UNDETECTED", f"bit {bit} of {path}"

    def load(self) -> str:
        """By each rank in turn: what the first one says that does not get the very same state."""
        for part in self.parts:
            with patch.object(Ranks, "current", return_value=Ranks(part.rank, len(self.parts))):
                came = part.load(self.checkpoint.directory.parent)
            if came != "equal state":
                return came
        return "equal state"

    def report(self, began: float) -> str:
        """Counts, by kind of file."""
        lines = []
        for kind in KINDS:
            came = {what: count for (of, what), count in sorted(self.came.items()) if of == kind}
            lines.append(f"  {kind}: {sum(came.values())} flips: {came}")
        total, missed = sum(self.came.values()), sum(n for (_, what), n in self.came.items() if what == "UNDETECTED")
        lines.append(f"{total} flips, {missed} undetected, {time.monotonic() - began:.0f} s")
        return "\n".join(lines)


def made_by(run: Run, save: Callable[..., tidegate.Checkpoint], saved: Path) -> tidegate.Checkpoint:
    """Of step 3, with files of `save_also`."""

    def save_also(folder: Path) -> None:
        torch.save([param.detach().clone() for param in run.params], folder / "model.pt")
        (folder / "more").mkdir()
        torch.save({"random": torch.get_rng_state()}, folder / "more" / "random.bin")

    run.steps(0, 3)
    return save(saved, save_also=save_also)


@pytest.fixture
def campaign(tmp_path: Path, disk: Path, memory: Path) -> Iterator[Campaign]:
    """Written at once, by one rank."""
    with Run(**both(disk, memory)) as run:
        made = made_by(run, run.optimizer.save_checkpoint, tmp_path / "saved")
        weights, state = [param.detach().clone() for param in run.params], run.optimizer.state_dict()
    with Run(**OTHER_CUT) as reader:
        yield begun(Campaign(made, [Part(0, weights, state, reader)]))


@pytest.fixture
def drained(tmp_path: Path, disk: Path, memory: Path) -> Iterator[Campaign]:
    """Written in the background: some of it linked, some held in files, some copied in memory."""
    with Run(**both(disk, memory)) as run:

        def drain(*args: Any, **more: Any) -> tidegate.Checkpoint:
            pending = run.optimizer.begin_checkpoint(*args, **more)
            assert pending.total_bytes > 0
            return pending.result()

        made = made_by(run, drain, tmp_path / "saved")
        weights, state = [param.detach().clone() for param in run.params], run.optimizer.state_dict()
    with Run(**OTHER_CUT) as reader:
        yield begun(Campaign(made, [Part(0, weights, state, reader)]))


def save_as_rank(rank: int, base: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{base / 'meeting'}", rank=rank, world_size=2)
    (base / f"disk-{rank}").mkdir()
    with Run(paths={"disk": base / f"disk-{rank}"}, host_cache=8000) as run:
        run.params[0].data += rank
        run.plain.params[0].weight += rank
        made_by(run, run.optimizer.save_checkpoint, base / "saved")
        torch.save(([param.detach().clone() for param in run.params], run.optimizer.state_dict()), base / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def of_two_ranks(tmp_path: Path) -> Iterator[Campaign]:
    ranks = [SPAWN.Process(target=save_as_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    (made,) = tidegate.find_checkpoints(tmp_path / "saved")
    with Run(**OTHER_CUT) as first, Run(**OTHER_CUT) as second:
        yield begun(
            Campaign(
                made, [Part(r, *torch.load(tmp_path / f"{r}.pt"), reader) for r, reader in enumerate((first, second))]
            )
        )


def begun(campaign: Campaign) -> Campaign:
    assert campaign.load() == "equal state"
    return campaign


def run_campaign(
    campaign: Campaign, capsys: pytest.CaptureFixture[str], flips: int, seed: int, what: str = "at once"
) -> None:
    """So many flips in the files of each kind; the files of a kind in turn. Counts are printed whatever comes."""
    began, chance = time.monotonic(), random.Random(seed)
    files = campaign.files()
    assert all(files.values()), files
    try:
        for number in range(flips):
            for kind, paths in files.items():
                path = paths[number % len(paths)]
                campaign.flip(kind, path, chance.randrange(8 * path.stat().st_size))
    finally:
        with capsys.disabled():
            print(f"\n{what}:\n{campaign.report(began)} (seed {seed})")
    for kind in ("manifest", "optimizer.pt", "saved files"):
        assert not campaign.came[kind, "equal state"], "every bit of these has a checksum"
    assert campaign.load() == "equal state"


@pytest.mark.slow
def test_two_hundred_flips_are_all_detected(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    run_campaign(campaign, capsys, 50, seed=24)


@pytest.mark.torture
def test_four_thousand_flips_are_all_detected(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    run_campaign(campaign, capsys, 1000, seed=int(os.environ.get("TIDEGATE_SEED", "24")))


@pytest.mark.torture
def test_every_bit_of_a_manifest_is_detected(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    """Each bit of the first and the last thousand bytes, where names, version and checksum are."""
    began, (manifest,) = time.monotonic(), campaign.files()["manifest"]
    size = manifest.stat().st_size
    try:
        for byte in (*range(min(1000, size)), *range(max(1000, size - 1000), size)):
            for bit in range(8):
                campaign.flip("manifest", manifest, 8 * byte + bit)
    finally:
        with capsys.disabled():
            print(f"\n{campaign.report(began)}")
    assert not campaign.came["manifest", "equal state"]


@pytest.mark.torture
@pytest.mark.parametrize("kind", ["drained", "of_two_ranks"])
def test_flips_in_other_kinds_of_checkpoints_are_all_detected(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    run_campaign(request.getfixturevalue(kind), capsys, 250, seed=int(os.environ.get("TIDEGATE_SEED", "24")), what=kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drained", "of_two_ranks"])
def test_a_few_flips_in_other_kinds_of_checkpoints_are_detected(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    run_campaign(request.getfixturevalue(kind), capsys, 15, seed=24, what=kind)
