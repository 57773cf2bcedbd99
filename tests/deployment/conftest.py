"""One Docker for all tests that need containers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.deployment.docker import why_not
from tests.deployment.stack import Stack, running


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints at once, with the time since the beginning: images take minutes."""
    capture, began = request.config.pluginmanager.getplugin("capturemanager"), time.monotonic()

    def said(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n[{time.monotonic() - began:4.0f} s] {text}", end="", flush=True)

    return said


@pytest.fixture(scope="session")
def stack(say: Callable[[str], None]) -> Iterator[Stack]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"containers cannot be run: {reason}")
    with running(say) as made:
        yield made
