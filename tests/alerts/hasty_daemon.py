"""The daemon as users run it, but that it takes a rank for lost after six seconds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.server.main import serve

LEASE_SECONDS = 2.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    options = parser.parse_args()
    sys.exit(serve(Settings(state_dir=options.state_dir, port=options.port, lease_seconds=LEASE_SECONDS)))
