"""Prints the OpenAPI document of the daemon's API: `python -m tidegate.daemon.openapi > docs/openapi.json`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.server.app import create_app


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(state_dir=Path(folder)))
        app.state.plane.store.close()
        print(json.dumps(app.openapi(), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
