"""Calibration: what it measures, what it refuses, how long it is kept, and how the command shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.services import ROOT
from tidegate import cli_calibrate
from tidegate.agent import calibrate as measure
from tidegate.agent.devices.emulated import EmulatedDevice, EmulatedRates
from tidegate.errors import ConfigError, PathUnusable
from tidegate.model import RateCard
from tidegate.model.calibration import Calibration, keep, kept
from tidegate.plan.ops import CPU, D2H, DEVICE, H2D
from tidegate.plan.split import PathSpeeds

SMALL = {"seconds": 0.001, "numel": 1000, "path_bytes": 1 << 20}


def test_cpu_and_paths_are_measured_and_nothing_is_emulated(tmp_path: Path) -> None:
    told: list[str] = []
    found = measure.calibrate({"disk": tmp_path}, progress=told.append, **SMALL)  # type: ignore[arg-type]
    card = found.card
    assert card.cpu_params_per_second == max(found.cpu_threads.values())
    assert set(found.cpu_threads) >= {1, len(os.sched_getaffinity(0))}
    assert set(card.paths) == {"disk"}
    assert set(card.keeps[CPU]) >= {"disk:read", "disk:write"}
    assert set(card.keeps["disk:read"]) >= {"disk:write", CPU}
    assert told[-1] == "path disk and cpu" or H2D in card.keeps
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    if H2D not in card.keeps:
        assert card.missing == (
            "h2d_bytes_per_second", "d2h_bytes_per_second", "device_params_per_second", "norm_params_per_second",
        )  # fmt: skip


def test_lanes_of_a_device_alone_and_together() -> None:
    """On the emulated device, with its bandwidth changed behind the back of who measures: that is what is found."""
    rates = EmulatedRates(h2d_bytes_per_second=4e6, d2h_bytes_per_second=1e6, update_params_per_second=1e5)
    with ExitStack() as stack:
        device = EmulatedDevice(1 << 20, rates)
        stack.callback(device.close)
        loads = measure._device_loads(stack, device, 1000)
        assert [load.lane for load in loads] == [H2D, D2H, DEVICE]
        cpu = measure.Load(CPU, lambda: 1.0)
        card = measure._with_device(RateCard(), [cpu, *loads], device, 1000, 0.01, lambda _: None)
        assert card.missing == ("cpu_params_per_second",)
        assert (card.h2d_bytes_per_second or 0) <= 4e6
        assert (card.d2h_bytes_per_second or 0) <= 1e6
        device.rates.d2h_bytes_per_second = 0.2e6
        again = measure._with_device(RateCard(), [cpu, *loads], device, 1000, 0.01, lambda _: None)
        assert (again.d2h_bytes_per_second or 0) <= 0.2e6
        shares = dict(measure._contention(loads, 0.01, lambda _: None))
        assert {lane: set(others) for lane, others in shares.items()} == {
            H2D: {D2H, DEVICE}, D2H: {H2D, DEVICE}, DEVICE: {H2D, D2H},
        }  # fmt: skip
        assert all(0 < share <= 1 for others in shares.values() for share in others.values())


def test_an_error_of_the_other_lane_is_told() -> None:
    def broken() -> float:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        measure.rate_beside(lambda: 1.0, broken, 0.0)


def test_a_path_is_measured_within_the_load_from_first_to_last() -> None:
    """Each calibration of the path sees the load at work before, after and while it runs."""
    done = threading.Semaphore(0)
    loaded: list[bool] = []
    rounds = iter([8e9, 1e9, 2e9])

    def load() -> float:
        done.release()
        return 1.0

    def path() -> PathSpeeds:
        # Pieces of the load that end while this goes on.
        loaded.extend(done.acquire(timeout=60) for _ in range(50))
        while done.acquire(blocking=False):
            pass
        speed = next(rounds)
        return PathSpeeds(read_bytes_per_second=speed, write_bytes_per_second=speed)

    alone = PathSpeeds(read_bytes_per_second=4e9, write_bytes_per_second=4e9)
    card = RateCard().with_paths({"disk": alone})
    found = measure._beside(card, "disk", [measure.Load(CPU, load)], path, 0.0, lambda _: None)
    assert len(loaded) == 50 * measure.PATH_ROUNDS
    assert all(loaded)
    assert (found.keeps["disk:read"][CPU], found.keeps["disk:write"][CPU]) == (0.5, 0.5), "the median round"
    assert 0 < found.keeps[CPU]["disk:read"] == found.keeps[CPU]["disk:write"] <= 1


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathUnusable):
        measure.calibrate({"disk": tmp_path / "missing"}, **SMALL)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lower numel"):
        measure.calibrate(numel=10**14)


def calibration(hardware: Mapping[str, str]) -> Calibration:
    card = RateCard(cpu_params_per_second=2e9, overhead_seconds=0.0, keeps={"cpu": {"disk:read": 0.8}})
    return Calibration(card=card, hardware=hardware, cpu_threads={1: 1e9, 2: 2e9}, measured_at=5.0)


def test_it_is_kept_until_the_hardware_changes(tmp_path: Path) -> None:
    file, hardware = tmp_path / "deep" / "calibration.json", measure.hardware({"disk": tmp_path})
    assert kept(file, hardware) is None
    keep(file, calibration(hardware))
    assert kept(file, hardware) == calibration(hardware)
    assert [found.name for found in file.parent.iterdir()] == ["calibration.json"]
    assert kept(file, {**hardware, "cpus": "1024"}) is None
    assert kept(file, measure.hardware({"disk": tmp_path, "other": tmp_path})) is None
    for broken in ("", "{}", "[]", json.dumps({**calibration(hardware).to_dict(), "version": 99})):
        file.write_text(broken)
        assert kept(file, hardware) is None
    with pytest.raises(ConfigError, match="cannot be kept"):
        keep(file / "below", calibration(hardware))


def command(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", "calibrate", *words], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "TIDEGATE_STATE_DIR": str(state)}, check=False,
    )  # fmt: skip


def test_the_command_shows_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    hardware = measure.hardware()
    keep(tmp_path / f"calibration-{hardware['host']}.json", calibration(hardware))
    cli_calibrate.calibrate(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["measured_now"] is False
    assert Calibration.from_dict(found) == calibration(hardware)
    cli_calibrate.calibrate()
    shown = capsys.readouterr().out
    assert "cpu, 2 threads" in shown
    assert "disk:read 80%" in shown


def test_each_set_of_paths_is_kept_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path / "state"))
    measured: list[dict[str, str]] = []

    def measuring(paths: dict[str, str], **_: object) -> Calibration:
        measured.append(paths)
        return calibration(measure.hardware(paths))

    monkeypatch.setattr(measure, "calibrate", measuring)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    sets = [[], [f"a={tmp_path}/one"], [f"a={tmp_path}/two"], [f"a={tmp_path}/one", f"b={tmp_path}/two"]]
    for path in (*sets, *sets, [*reversed(sets[-1])]):
        cli_calibrate.calibrate(path=path, as_json=True)
    assert len(measured) == len(sets)


def test_the_command_refuses_what_is_no_path(tmp_path: Path) -> None:
    done = command(tmp_path, "--path", "disk")
    assert (done.returncode, "is not NAME=DIR" in done.stderr) == (2, True)
    with pytest.raises(ConfigError, match="cannot be called"):
        cli_calibrate.calibrate(path=["Host=/tmp"])
