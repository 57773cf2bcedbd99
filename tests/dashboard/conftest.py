"""A real daemon for each test that wants one, and agents that report what a script says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from tests.dashboard import caches  # noqa: E402
from tests.dashboard.scripted import Daemon, start_daemon  # noqa: E402


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    caches.forget()
    yield
    caches.forget()


@pytest.fixture(autouse=True)
def _main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit puts its script in the place of `__main__`, which processes that are spawned later would run again."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon on a free port with its state in a temporary directory; the page under test finds both."""
    state = tmp_path / "state"
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(state))
    for name in ("TIDEGATE_TOKEN", "TIDEGATE_READ_TOKEN", "TIDEGATE_OPERATE_TOKEN", "TIDEGATE_AGENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with start_daemon(state) as running:
        monkeypatch.setenv("TIDEGATE_DAEMON", running.url)
        yield running
