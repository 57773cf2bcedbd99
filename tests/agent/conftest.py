"""For tests of the agent: what a fake GPU has registered stays mapped, and nobody hears that the device is emulated."""

from collections.abc import Iterator

import pytest

from tests.agent.fake_memory import watched_mappings
from tidegate.agent.devices import selection


@pytest.fixture(autouse=True)
def _registered_pages_stay_mapped() -> Iterator[None]:
    with watched_mappings():
        yield


@pytest.fixture(autouse=True)
def _warned_of_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_warned", {selection.EMULATED})
