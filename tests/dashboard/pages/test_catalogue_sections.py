"""Every family of the catalogue that names a section of a page is in that section, with its figure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from html import unescape
from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.screen import again, page
from tests.dashboard.scripted import Agent, Daemon
from tidegate.dashboard.pages.registry import SCREENS
from tidegate.metrics.catalogue import BY_NAME

SHOWN = {
    "phase_seconds": "forward 610 ms",
    "exposed_seconds_total": "60.0 ms",
    "step_timestamp_seconds": "last step ended",
    "step": "step 25",
    "skipped_steps_total": "0 skipped of 25",
    "tokens_total": ",4658.3]",
    "loss": ",3.8967]",
    "grad_norm": ",1.1072]",
    "stall_seconds_total": "held up the update",
    "link_bytes_total": "5.00 GB a step",
    "link_busy_seconds_total": "350 ms",
    "path_bytes_total": "4.00 GB",
    "path_busy_seconds_total": "4.00 GB/s",
    "path_lock_wait_seconds_total": "1.25 s",
    "path_errors_total": "lock wait errors",
    "path_ceiling_bytes_per_second": "50 %",
    "path_free_bytes": "900 GB",
    "path_written_bytes_per_day": "98.7 TB",
    "device_memory_peak_bytes": '"y":[38.7,',
    "device_memory_capacity_bytes": "80.0 GB in all",
    "host_memory_bytes": '"y":[2.2,',
    "cpu_seconds_total": "14.8 s",
    "update_params_total": "updated by device 500 M params",
    "subgroups": "state on nvme 2 subgroups",
    "knob": "3 (device share 33 %)",
    "tier_share": "tier_split",
    "generation": "generation 0",
    "predicted_phase_seconds": "predicted update 1.40 s",
    "prediction_error_ratio": "off by",
    "agents": "live",
    "desired_generation": "generation 0;",
    "refused_agents": "because they send no token",
}
"""What to look for, by family without its prefix: the figures of the scripted run."""


def walk(block: Any) -> Iterator[Any]:
    for child in block.children.values():
        if hasattr(child, "children"):
            yield from walk(child)
        else:
            yield child


def plain(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)))


def sections(app: AppTest) -> dict[str, str]:
    """All words and figures of a page by the title that they stand below; those above all titles are its header."""
    found: defaultdict[str, str] = defaultdict(str)
    title = "Header"
    for element in walk(app.main):
        if element.type == "html":
            before, *rest = element.proto.body.split('<div class="tg-title">')
            found[title] += plain(before)
            for part in rest:
                title = unescape(part.partition("<")[0])
                found[title] += plain(part)
        elif element.type == "plotly_chart":
            found[title] += element.proto.spec.replace("\\u002f", "/")
    return dict(found)


@pytest.fixture
def shown(daemon: Daemon) -> dict[str, str]:
    httpx.post(f"{daemon.url}/v1/agents", trust_env=False)  # without a token
    Agent(daemon, paths=("nvme", "pfs"), device_memory_bytes=80_000_000_000).train(25)
    found: defaultdict[str, str] = defaultdict(str)
    for screen in SCREENS:
        app = page(screen.path, run="llama-7b")
        assert not app.exception, screen.path
        for title, words in sections(again(app)).items():
            found[title] += words
    return found


def test_every_family_that_names_a_section_is_there_with_its_figure(shown: dict[str, str]) -> None:
    seen = {metric.name.removeprefix("tidegate_"): metric.screen for metric in BY_NAME.values() if metric.screen}
    assert set(seen) == set(SHOWN), "a family that names a section needs a figure to look for"
    missing = [
        f"{name}: {SHOWN[name]!r} is not in {section!r}"
        for name, section in seen.items()
        if SHOWN[name] not in shown.get(str(section), "")
    ]
    assert not missing
