"""The acceptance of alerts: real faults, real services, runbooks followed word by word; see `scenario`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agent.tiers.faults import require_mounts
from tests.alerts.scenario import CASES, SECONDS, in_namespaces


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_each_fault_raises_its_alert_and_its_runbook_mends_it(tmp_path: Path) -> None:
    require_mounts("losetup", "mkfs.ext4")
    done = in_namespaces(tmp_path)
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout.removeprefix("SKIP").strip())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["alert"] for record in records] == [case.alert for case in CASES]
    assert all(record["commands"] for record in records)
