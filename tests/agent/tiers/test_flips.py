"""One flipped bit anywhere in a checkpoint: an error with a name, or the very same state; never another one."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.tiers.saving import Run, both
from tidegate.errors import StorageError

KINDS = ("manifest", "optimizer.pt", "saved files", "state")


@dataclass
class Campaign:
    """A checkpoint, what is in it, and what came of flips in it."""

    checkpoint: tidegate.Checkpoint
    weights: list[torch.Tensor]
    state: dict[str, Any]
    reader: Run
    """It loads the checkpoint again and again."""
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
        """As the documentation says: checked, weights loaded, state loaded."""
        optimizer, directory = self.reader.optimizer, self.checkpoint.directory.parent
        try:
            found = tidegate.find_checkpoints(directory)
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

    def report(self, began: float) -> str:
        """Counts, by kind of file."""
        lines = []
        for kind in KINDS:
            came = {what: count for (of, what), count in sorted(self.came.items()) if of == kind}
            lines.append(f"  {kind}: {sum(came.values())} flips: {came}")
        total, missed = sum(self.came.values()), sum(n for (_, what), n in self.came.items() if what == "UNDETECTED")
        lines.append(f"{total} flips, {missed} undetected, {time.monotonic() - began:.0f} s")
        return "\n".join(lines)


@pytest.fixture
def campaign(tmp_path: Path, disk: Path, memory: Path) -> Iterator[Campaign]:
    def save_also(folder: Path) -> None:
        torch.save([param.detach().clone() for param in run.params], folder / "model.pt")
        (folder / "more").mkdir()
        torch.save({"random": torch.get_rng_state()}, folder / "more" / "random.bin")

    with Run(**both(disk, memory)) as run:
        run.steps(0, 3)
        made = run.optimizer.save_checkpoint(tmp_path / "saved", save_also=save_also)
        weights, state = [param.detach().clone() for param in run.params], run.optimizer.state_dict()
    with Run(stride="off", subgroup_numel=5000) as reader:
        made_of = Campaign(made, weights, state, reader)
        assert made_of.load() == "equal state"
        yield made_of


def run_campaign(campaign: Campaign, capsys: pytest.CaptureFixture[str], flips: int, seed: int) -> None:
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
            print(f"\n{campaign.report(began)} (seed {seed})")
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
