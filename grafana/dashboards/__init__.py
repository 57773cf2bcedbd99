"""The Grafana dashboards as code: functions that build them, and the JSON files that Grafana reads.

`python -m tidegate.grafana.dashboards` writes the JSON files; with `--check` it only reports the files that differ from
the output of the code, and fails if there are any.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from tidegate.grafana.dashboards import fleet, links, node, run, runbooks

FOLDER: Final = Path(__file__).resolve().parent / "json"
DASHBOARDS: Final[dict[str, Callable[[], Dashboard]]] = {
    "fleet": fleet.dashboard,
    "run": run.dashboard,
    "links": links.dashboard,
    "node": node.dashboard,
    "runbooks": runbooks.dashboard,
}
"""The functions that build the dashboards, by name of the JSON file without its ending."""


def rendered() -> dict[Path, str]:
    """The expected content of each dashboard's JSON file, by path."""
    return {FOLDER / f"{name}.json": _text(make()) for name, make in DASHBOARDS.items()}


def _text(made: Dashboard) -> str:
    built = made.build()
    for number, panel in enumerate(built.panels or (), start=1):
        panel.id_val = number  # links to a panel name it
    return json.dumps(built, cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"
