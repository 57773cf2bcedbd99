"""What is measured of a path at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.agent.tiers.file_path import PathSettings, StoragePath
from tidegate.plan.interference import DUPLEX, HALF_DUPLEX


@pytest.fixture
def path(tmp_path: Path) -> StoragePath:
    made = StoragePath("nvme", PathSettings(directory=tmp_path), "calibration", 0, bytes(16))
    yield made  # type: ignore[misc]
    made.close()


@pytest.mark.parametrize(("both", "duplex"), [(1.0, True), (2.0, True), (2.2, True), (2.3, False), (3.0, False)])
def test_a_path_that_does_both_at_once_in_little_more_than_one_is_duplex(
    path: StoragePath, monkeypatch: pytest.MonkeyPatch, both: float, duplex: bool
) -> None:
    seconds = {("write",): 1.0, ("read",): 2.0, ("write", "read"): both}
    monkeypatch.setattr(path._mover, "seconds", lambda ways, *_: seconds[ways])
    speeds = path.calibrate(4 << 20)
    assert speeds.write_bytes_per_second == 4 << 20
    assert speeds.read_bytes_per_second == 2 << 20
    assert speeds.factors == (DUPLEX if duplex else HALF_DUPLEX)


def test_one_stall_does_not_make_a_path_slow(path: StoragePath, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 8.0, 2.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(path._mover, "seconds", lambda *_: next(seconds))
    assert path.calibrate(4 << 20).read_bytes_per_second == 2 << 20


def test_real_speeds_are_positive_and_nothing_is_left(path: StoragePath, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    speeds = path.calibrate(4 << 20)
    assert speeds.read_bytes_per_second > 1e5
    assert speeds.write_bytes_per_second > 1e5
    assert sorted(tmp_path.rglob("*")) == before
