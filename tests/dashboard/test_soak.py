"""`make soak`: the live view stays open for half an hour, with 8 ranks that report every second.

`make soak SOAK_OUT=bench/results/soak-<hardware>.jsonl` appends what was measured to that file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.services import ROOT

MINUTES = 30


@pytest.mark.soak
def test_the_live_view_neither_leaks_nor_slows_down() -> None:
    out = os.environ.get("SOAK_OUT")
    command = [sys.executable, "bench/soak.py", "--json", "--minutes", str(MINUTES), *(["--out", out] if out else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * (MINUTES + 10))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["meets_claim"], found
