"""bench/gpu.sh at toy size on the emulated device: the script must work before it meets a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from bench.gpu import environment
from bench.gpu.iterations import SIDES, speedups
from bench.gpu.trace import summary
from bench.gpu.watching import SCRAPE_INTERVAL

ROOT = Path(__file__).resolve().parents[2]


def gpu_sh(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "bench" / "gpu.sh"), *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable} | variables, cwd="/", capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_every_stage_runs_and_none_runs_twice(tmp_path: Path) -> None:
    # The other two shapes are the same code.
    stages = [
        "links",
        "calibration",
        "tests",
        "parity",
        "updates",
        "trace",
        "watching",
        "iterations-1b",
        "sweeps",
        "tiers",
    ]
    done = gpu_sh("--dry", "--out", str(tmp_path), *stages)
    assert done.returncode == 0, done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == set(stages)
    assert all(result["dry"] for result in found.values())
    assert found["tests"]["counts"]["tests"] > 50
    assert found["parity"]["weights_unlike_the_oracle"] == 0
    assert found["parity"]["largest_relative_difference_of_losses"] < 1e-4
    assert {row["stride"] for row in found["updates"]["settings"]} >= {"off", 3.0, 6.0}
    assert all(0 < row["share_of_bound"] < 1 for row in found["updates"]["settings"])
    assert found["trace"]["ours"]["busy_seconds"].keys() == {"h2d", "d2h", "cpu", "device"}
    assert 0 < found["watching"]["scrape_seconds"] / SCRAPE_INTERVAL < found["watching"]["overhead_ratio"]
    rounds = found["iterations-1b"]["rounds"]
    assert "not_measured" not in rounds["tidegate"][0] | rounds["tidegate_overlap"][0]
    assert "torchao" in rounds["torchao"][0]["not_measured"]
    for row in (*found["sweeps"]["rows"], *found["tiers"]["rows"].values()):
        assert row["iteration_seconds"]["median"] > 0, row
    again = gpu_sh("--dry", "--out", str(tmp_path), *stages)
    assert again.stdout.count("done already") == len(stages)


def test_watching_counts_as_many_scrapes_as_prometheus_makes() -> None:
    config = yaml.safe_load((ROOT / "grafana" / "prometheus" / "prometheus.yml").read_text())
    assert config["global"]["scrape_interval"] == f"{SCRAPE_INTERVAL:g}s"


def test_speedups_are_of_medians_and_of_sides_that_were_measured() -> None:
    row = lambda seconds: {"iteration_seconds": {"median": seconds}, "update_seconds": {"median": seconds / 2}}  # noqa: E731
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in SIDES}
    rows |= {"tidegate": [row(1.0), row(2.0)], "zero3_cpu": [row(6.0)], "torchao": [{"not_measured": "absent"}]}
    assert speedups(rows) == {"zero3_cpu": {"iteration_seconds": 4.0, "update_seconds": 4.0}}


def test_overlap_is_of_the_shorter_kind() -> None:
    found = summary({"h2d": [(0, 2), (1, 3)], "d2h": [(2, 3), (5, 6)], "cpu": []})
    assert found == {"busy_seconds": {"h2d": 3, "d2h": 2}, "overlap": {"h2d+d2h": 0.5}}


def test_a_stage_that_fails_leaves_no_result(tmp_path: Path) -> None:
    failed = gpu_sh("--dry", "--out", str(tmp_path), "updates")
    assert failed.returncode == 1
    assert "`links` comes first" in failed.stderr
    assert "`links` comes first" in (tmp_path / "updates.log").read_text()
    assert not (tmp_path / "updates.json").exists()


def test_what_it_does_not_know_is_answered_with_its_usage() -> None:
    wrong = gpu_sh("--fast")
    assert wrong.returncode == 2
    assert "bench/gpu.sh [--dry] [--out OUT] [--seconds S] [STAGE...]" in wrong.stderr


def tiny_wheel(folder: Path, name: str) -> None:
    """A module of this name, as pip installs it."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "told = 'from the wheel'",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(path, text)


def all_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each."""
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found if not path.is_dir()}


@pytest.mark.slow
def test_wheels_go_into_an_environment_of_the_bench_and_the_python_stays_as_it_is(tmp_path: Path) -> None:
    """A Python that belongs to somebody, marked as one into which nothing may be installed."""
    mine, wheels, out = tmp_path / "mine", tmp_path / "wheels", tmp_path / "out"
    environment.make(mine)
    (site_packages,) = mine.glob("lib/python*/site-packages")
    (site_packages.parent / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=It is somebody's.\n")
    for folder in (wheels, out):
        folder.mkdir()
    tiny_wheel(wheels, "tidegate_tiny_wheel")
    (out / "links.json").write_text("{}")  # a stage that is done: none runs
    before = all_files(mine)

    done = gpu_sh(
        "--dry", "--out", str(out), "links", PYTHON=str(mine / "bin" / "python"), WHEELS=str(wheels),
        PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "links: done already" in done.stdout
    assert all_files(mine) == before

    def told(python: Path) -> subprocess.CompletedProcess[str]:
        code = "import tidegate_tiny_wheel, tidegate.kernels, torch; print(tidegate_tiny_wheel.told)"
        return subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, check=False)

    assert told(out / "venv" / "bin" / "python").stdout == "from the wheel\n"
    assert "No module named 'tidegate_tiny_wheel'" in told(mine / "bin" / "python").stderr
