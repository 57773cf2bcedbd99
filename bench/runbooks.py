"""Claim: an alert fires soon after its fault, and its runbook, followed literally, solves the problem.

Prometheus, Alertmanager, daemon and training run are real; the device is emulated. State is on two file systems on loop
devices. The bench makes four faults: the kernel throttles one of the file systems; the file system is filled up; the
run is killed; the daemon is killed. The remedies are the commands on the pages in docs/runbooks.

The bench divides the durations in the alert rules by 60, so these waiting times are 60 times as long in production. The
times for detection (leases) and repair are real. Writes results/runbooks.json. Needs root.
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
        _skip("it mounts file systems and throttles one, which needs root")
        return
    with tempfile.TemporaryDirectory() as folder:
        done = in_namespaces(Path(folder), 600)
    if done.stdout.startswith("SKIP"):
        _skip(done.stdout.removeprefix("SKIP").strip())
        return
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


def _skip(why: str) -> None:
    print(json.dumps({"skipped": why}))


if __name__ == "__main__":
    main()
