"""For tests of the agent: pages that a fake GPU has registered stay mapped."""

from collections.abc import Iterator

import pytest

from tests.agent.fake_memory import watched_mappings


@pytest.fixture(autouse=True)
def _registered_pages_stay_mapped() -> Iterator[None]:
    with watched_mappings():
        yield
