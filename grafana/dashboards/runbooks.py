"""The dashboard "Runbooks": the pages of docs/runbooks, so that an operator can read them in Grafana when an alert
fires."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tidegate.grafana.dashboards.frame import frame, live_view
from tidegate.grafana.dashboards.panels import page

PAGES: Final = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
LINES_OF_A_ROW: Final = 1.3
"""Approximate number of text lines in one row of Grafana's grid. Longer pages scroll."""


def dashboard() -> Dashboard:
    made = frame("runbooks", "Tidegate / Runbooks", "What each alert means, how to look, what to turn.", one_run=None)
    live_view(made)
    for path in sorted(PAGES.glob("Tidegate*.md")):
        markdown = path.read_text()
        height = min(30, 4 + round(markdown.count("\n") / LINES_OF_A_ROW))
        made.with_panel(page(path.stem, f"The runbook of the alert {path.stem}.", markdown, height))
    return made
