"""For all tests: which examples Hypothesis tries, in which order files come, locks of one's own, and Ctrl-C.

Processes of a user take turns on storage devices, by locks in XDG_RUNTIME_DIR: each process of pytest has a directory
of its own, so that tests which run beside each other do not wait for each other's.

What a shell starts in the background ignores Ctrl-C, and so do its children: tests that send one would wait in vain.
"""

import gc
import os
import signal
import tempfile

import pytest

from tests.examples import register_profiles
from tests.parts import LONGEST, TESTS

register_profiles()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    runtime = tempfile.TemporaryDirectory(prefix="tidegate-locks-")
    os.environ["XDG_RUNTIME_DIR"] = runtime.name
    config.add_cleanup(runtime.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: two workers then end at about the same time."""
    rank = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """What was imported is left out of collections of garbage: many tests, and Streamlit, ask for one at a time."""
    gc.collect()
    gc.freeze()
