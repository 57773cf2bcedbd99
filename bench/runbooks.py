"""Claim: an alert comes soon after its fault, and its runbook, followed word by word, mends it.

Real Prometheus, Alertmanager, daemon and training run (on the emulated device) with state on two loop file systems; one
is throttled by the kernel, filled up, the run killed, the daemon killed. The commands are taken from the pages in
docs/runbooks. Durations of the rules are divided by 60: multiply seconds of waiting by it for the time on a clock, not
those of detection (leases) or repair. Writes results/runbooks.json. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "runbooks.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # the scenario is a test's
    from tests.alerts.scaling import DIVISOR
    from tests.alerts.scenario import in_namespaces

    if os.geteuid() != 0:
        sys.exit("The scenario mounts file systems and throttles one: run it as root.")
    with tempfile.TemporaryDirectory() as folder:
        done = in_namespaces(Path(folder), 600)
    if done.stdout.startswith("SKIP"):
        sys.exit(done.stdout.removeprefix("SKIP").strip())
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"machine": machine, "load": os.getloadavg()[0], "durations_divided_by": DIVISOR, "records": records}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    if not options.json:
        for record in records:
            times = f"fired after {record['seconds_to_fire']} s, resolved {record['seconds_to_resolve']} s later"
            print(f"{record['alert']}: {record['fault']}; {times}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
