"""For tests of the agent: what a fake GPU has registered stays mapped, nobody hears that the device is emulated, and
there are two file systems: the one that tests write to, and one in memory."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.devices.fake_memory import watched_mappings
from tidegate.agent.devices import selection


@pytest.fixture(autouse=True)
def _registered_pages_stay_mapped() -> Iterator[None]:
    with watched_mappings():
        yield


@pytest.fixture(autouse=True)
def _warned_of_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_warned", {selection.EMULATED})


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as directory:
        yield Path(directory)
