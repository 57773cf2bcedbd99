"""One daemon for all tests of this folder that leave it running; every test has runs of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from tests.daemon.live import Daemon, threaded  # noqa: E402


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Deadlines and leases outlive the tests, also where the machine stands still for a while."""
    with threaded(
        tmp_path_factory.mktemp("state"), proposal_seconds=60.0, lease_seconds=60.0, forgiven_failures=10**6
    ) as running:
        yield running


@pytest.fixture(scope="session")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that loses ranks after three leases of 0.3 s."""
    with threaded(tmp_path_factory.mktemp("hasty"), proposal_seconds=0.3, lease_seconds=0.3) as running:
        yield running
