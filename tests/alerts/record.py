"""Writes `recorded.prom`: every series that a real Prometheus has of a real run and its daemon, as federation tells it.

`unshare --mount --pid --fork --kill-child --mount-proc python -m tests.alerts.record DIRECTORY`. To be done again when
families change; the rules' tests take their label sets from it.
"""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import httpx

from tests.alerts.stand import stand
from tests.services import until

RECORDED = Path(__file__).with_name("recorded.prom")
HOST = "host-1"
"""In place of the machine's name."""


def main(base: Path) -> None:
    with stand(base) as made:
        until(lambda: made.prometheus.query("tidegate_path_written_bytes_per_day"), "all families", 60)
        until(lambda: made.prometheus.query("tidegate_prediction_error_ratio"), "a prediction", 60)
        match = {"match[]": '{job=~"tidegate-.*",__name__=~"tidegate_.*|up"}'}
        text = httpx.get(f"{made.prometheus.url}/federate", params=match, trust_env=False).text
    lines = [re.sub(r" \d{13}$", "", line) for line in text.splitlines() if not line.startswith("#")]
    lines = [line.replace(f'"{socket.gethostname()}"', f'"{HOST}"') for line in lines if "_bucket{" not in line]
    lines = [line for line in lines if not line.startswith("tidegate_request")]
    RECORDED.write_text("".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
