"""bench/papers.py: every figure is there, from the papers' own rates, and errors are what the figures say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
REPORTED: dict[str, Any] = json.loads((BENCH / "published" / "reported.json").read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCH / "papers.py"), "--json"], cwd="/", capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_every_reported_figure_is_answered_and_scored(found: dict[str, Any]) -> None:
    assert [row["id"] for row in found["rows"]] == [row["id"] for row in REPORTED["rows"]]
    for row in found["rows"]:
        assert row["assumes"].endswith(".")
        if row["ours"] is not None:
            assert row["error"] == pytest.approx(abs(row["ours"] - row["reported"]) / row["reported"], abs=1e-3)
    assert found["scored_rows"] + len(found["calibration_rows"]) == len(REPORTED["rows"])


def test_the_median_error_is_within_the_target(found: dict[str, Any]) -> None:
    errors = sorted(row["error"] for row in found["rows"])
    assert found["median_abs_error"] == pytest.approx((errors[22] + errors[23]) / 2, abs=1e-4)
    assert found["median_abs_error"] <= 0.20


def test_host_memory_is_what_makes_the_difference(found: dict[str, Any]) -> None:
    """Without the contention term an update is predicted far too fast: the review's objection to Eq. 1."""
    sys.path.insert(0, str(BENCH))
    try:
        from published import dos
        from published.cards import Cards, variants
    finally:
        sys.path.remove(str(BENCH))
    alone = dict(dos.answers(variants()["host memory without limit"]))
    shared = dict(dos.answers(Cards()))
    assert alone["dos8_update_throughput"].value == pytest.approx(2.69, abs=0.1)
    assert abs((shared["dos8_update_throughput"].value or 0) - 1.7) < 0.2
    rows = {row["id"]: row for row in found["rows"]}
    assert rows["dos8_update_throughput"]["ours"] == pytest.approx(shared["dos8_update_throughput"].value, rel=1e-3)


def test_rate_cards_are_those_of_the_papers() -> None:
    sys.path.insert(0, str(BENCH))
    try:
        from published.cards import JLSE, POLARIS, V100, V100_DEVICE
        from published.systems import JLSE_COPY, JLSE_DEVICE, JLSE_GRADIENT
    finally:
        sys.path.remove(str(BENCH))
    for name, machine in (("jlse_h100", JLSE), ("polaris_a100", POLARIS)):
        told = REPORTED["machines"][name]
        assert machine.h2d_bytes_per_second == machine.d2h_bytes_per_second == told["pcie_pinned_each_way"] * 1e9
        assert machine.host_memory_bytes == told["host_memory_gb"] * 1e9
        for path in ("nvme", "pfs"):
            speeds = machine.by_name[path]
            assert speeds.read_bytes_per_second == told[f"{path}_read"] * 1e9
            assert speeds.write_bytes_per_second == told[f"{path}_write"] * 1e9
    jlse, v100 = REPORTED["machines"]["jlse_h100"], REPORTED["machines"]["v100_node"]
    assert (JLSE.cpu_params_per_second, JLSE_DEVICE) == (8e9, jlse["update_rate_gpu_all"] * 1e9 / 4)
    assert jlse["copy_updated_params_rate_all"] * 1e9 / 4 * 2 == JLSE_COPY
    assert jlse["copy_g16_to_h32"] * 1e9 == JLSE_GRADIENT
    assert v100["transfer_rate"] * 1e9 * 4 == V100.h2d_bytes_per_second
    assert (V100.cpu_params_per_second, V100_DEVICE) == (2e9, v100["update_rate_gpu"] * 1e9 / 4)
    assert REPORTED["setting"]["subgroup_numel"] == 1e8
