"""Calibration: what it measures, what it refuses, how long it is kept, and how the command shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch

import tidegate
from tests.services import ROOT
from tidegate.agent.calibration import calibrate as measure
from tidegate.agent.calibration import lane_rates, step_timing
from tidegate.agent.calibration.hardware import hardware as hardware_of
from tidegate.agent.calibration.hardware import last_level_cache_bytes
from tidegate.agent.calibration.lane_rates import LaneThroughput, Load, MeasurementRound
from tidegate.agent.calibration.saved_rate_card import saved_rate_card
from tidegate.agent.devices.base import Device
from tidegate.agent.devices.emulated import EmulatedDevice, EmulatedRates
from tidegate.agent.ranks import cpu_lane_threads
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.cli import calibrate
from tidegate.errors import ConfigError, PathFull, PathUnusable
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import CPU, OpKind, Subgroup
from tidegate.plan.tier_split import PathSpeeds
from tidegate.simulator.calibration_fit import MeasuredStep
from tidegate.simulator.steady_state import Rank
from tidegate.simulator.what_if import what_if
from tidegate.speeds.rate_card import RateCard
from tidegate.speeds.saved_calibration import Calibration, calibration_file, load_calibration, save_calibration

SMALL: Final[dict[str, Any]] = {"seconds": 0.001, "numel": 1000, "op_bytes": 1 << 16, "rounds": 1}


def test_cpu_and_paths_are_measured_and_nothing_is_emulated(tmp_path: Path) -> None:
    told: list[str] = []
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    found = measure.calibrate(
        {"disk": tmp_path / "disk", "other": PathSettings(directory=tmp_path / "other", threads=1)},
        progress=told.append,
        **SMALL,
    )
    card = found.card
    assert card.cpu_params_per_second == found.cpu_threads[found.card_threads]
    assert found.card_threads == cpu_lane_threads()
    assert set(found.cpu_threads) >= {1, len(os.sched_getaffinity(0))}
    assert set(card.paths) == {"disk", "other"}
    lanes = {CPU, "disk:read", "disk:write", "other:read", "other:write"}
    assert set(card.keeps) >= lanes
    assert all(set(card.keeps[lane]) >= lanes - {lane} for lane in lanes), "two paths beside each other, too"
    assert (card.overhead_seconds or 0) > 0
    assert card.step_seconds is not None
    assert told[-1] == ("ops that do nothing" if torch.cuda.is_available() else "a step of one subgroup")
    assert [list((tmp_path / name).iterdir()) for name in ("disk", "other")] == [[], []], "nothing is left behind"
    if not torch.cuda.is_available():
        assert card.missing == (
            "h2d_bytes_per_second", "d2h_bytes_per_second", "device_params_per_second", "norm_params_per_second",
        )  # fmt: skip


@pytest.mark.slow
def test_predictions_follow_a_device_only_once_it_is_calibrated_again() -> None:
    """The emulated bandwidth is changed behind the back of who predicts."""
    subgroups = [Subgroup(i, 100_000, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(4)]
    rank, staged = Rank(subgroups, 2), EffectiveKnobs(1.0, 0.0)
    with closing(EmulatedDevice(1 << 20, EmulatedRates(h2d_bytes_per_second=1e9, d2h_bytes_per_second=1e9))) as device:

        def card() -> RateCard:
            return measure.calibrate(device=device, **SMALL).card

        before = card()
        predicted = what_if(rank, staged, before).update_seconds
        device.rates.h2d_bytes_per_second = 1e6
        assert what_if(rank, staged, before).update_seconds == predicted
        after = card()
    # What is paced is never faster, and a busy machine does not make copies a hundred times slower.
    assert (after.h2d_bytes_per_second or 0) <= 1e6
    late = sum(s.nbytes("state") for s in subgroups[rank.num_slots :])
    assert predicted < late / 1e6 <= what_if(rank, staged, after).update_seconds


@pytest.mark.slow
def test_with_a_device_paths_are_corrected_by_steps_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[MeasuredStep] = []

    def kept_steps(*args: Any) -> list[MeasuredStep]:
        taken.extend(step_timing.engine_steps(*args))
        return taken

    monkeypatch.setattr(measure, "engine_steps", kept_steps)
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    with closing(EmulatedDevice(1 << 20)) as device:
        card = measure.calibrate({name: tmp_path / name for name in ("disk", "other")}, device=device, **SMALL).card
    assert {step.plan.paths for step in taken} == {(), ("disk",), ("other",)}
    for path in ("disk", "other"):
        sizes = {len(step.plan.subgroups) for step in taken if step.plan.paths == (path,)}
        assert sizes == {4, 16}
        assert {f"{path}:read", f"{path}:write"} <= set(card.op_seconds)
    assert [list((tmp_path / name).iterdir()) for name in ("disk", "other")] == [[], []], "nothing is left behind"


@pytest.mark.parametrize(("cache_bytes", "available", "expected"), [
    (0, 10**12, measure.NUMEL),
    (300 << 20, 10**12, 4 * (300 << 20) // 14),
    (300 << 20, 140 * 20_000_000, 20_000_000),
    (300 << 20, 10**6, measure.NUMEL),
])  # fmt: skip
def test_the_update_is_larger_than_the_last_level_cache(
    monkeypatch: pytest.MonkeyPatch, cache_bytes: int, available: int, expected: int
) -> None:
    """Where 300 MiB of cache held the 224 MB of an update, the CPU was measured faster than it is in training."""
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: cache_bytes)
    monkeypatch.setattr(measure, "host_available_bytes", lambda: available)
    assert measure._numel_beyond_caches() == expected


@pytest.mark.parametrize(("kind", "device_free", "host_free", "expected"), [
    ("emulated", 10**12, 10**12, 5_000_000),
    ("cuda", 10**12, 10**12, measure.GPU_STEP_NUMEL),
    ("cuda", 80 * 8 * 14 * 10**6, 10**12, 80_000_000),
    ("cuda", 10**12, 60 * 8 * 14 * 10**6, 60_000_000),
    ("cuda", 10**6, 10**12, 5_000_000),
])  # fmt: skip
def test_steps_on_a_gpu_are_long(
    monkeypatch: pytest.MonkeyPatch, kind: str, device_free: int, host_free: int, expected: int
) -> None:
    """With small subgroups an update on an H100 took twice as long as it does in training."""
    monkeypatch.setattr(measure, "host_available_bytes", lambda: host_free)
    device = SimpleNamespace(kind=kind, capacity_bytes=device_free + 7, in_use_bytes=7)
    assert measure._step_numel(cast(Device, device), 5_000_000) == expected


def test_caches_of_several_dies_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        for level, size in ((0, "48K"), (2, "2048K"), (3, "32768K")):
            cache = tmp_path / f"devices/system/cpu/cpu{cpu}/cache/index{level}"
            cache.mkdir(parents=True)
            (cache / "size").write_text(f"{size}\n")
            (cache / "shared_cpu_list").write_text(f"{shared if level == 3 else cpu}\n")
    assert last_level_cache_bytes(tmp_path) == 2 * (32768 << 10)
    assert last_level_cache_bytes(tmp_path / "none") == 0


def test_a_forked_process_on_a_host_with_a_gpu_has_hardware_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> str:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", refuses)
    assert hardware_of()["gpu"] == "not known in a forked process"


def test_gradients_are_copied_before_the_update_of_a_calibrations_step() -> None:
    """What a backward hides must not count as the update's. Gradients of 0.4 MB take 40 ms here."""
    rates = EmulatedRates(d2h_bytes_per_second=1e7)
    with closing(EmulatedDevice(1 << 22, rates)) as device:
        steps = step_timing.engine_steps(device, 200_000, 1, rates.d2h_bytes_per_second, {})
    late = [
        max(span.end for span in step.spans if span.kind is OpKind.GRAD_D2H) - step.called
        for step in steps
        if step.plan.updated_params("device") == 0
    ]
    assert sorted(late)[len(late) // 2] < 0


def test_a_path_without_room_for_an_engine_is_refused_at_start(tmp_path: Path) -> None:
    told: list[str] = []
    small = PathSettings(directory=tmp_path, capacity_bytes=20_000_000)
    with (
        closing(EmulatedDevice(1 << 26)) as device,
        pytest.raises(PathFull, match=r"on path disk.*are free: free some"),
    ):
        measure.calibrate({"disk": small}, device=device, progress=told.append, **{**SMALL, "numel": 2_000_000})
    assert not any("disk" in what for what in told), "before anything is measured there"
    assert list(tmp_path.iterdir()) == []


def test_what_an_op_costs_is_told_from_what_a_byte_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op takes 2 seconds, and 1 for 10 bytes: pieces of 1000 and of 100 show both."""
    pieces = {1000: (102.0, 1000.0), 100: (12.0, 100.0)}
    monkeypatch.setattr(lane_rates, "mean_per_piece", lambda once, _: pieces[once()])
    found = lane_rates.lane_throughput(Load("h2d", lambda: 1000, lambda: 100), 0.1)
    assert found == pytest.approx(LaneThroughput(rate=10.0, op_seconds=2.0, once=1000 / 102))
    same = lane_rates.lane_throughput(Load("h2d", lambda: 1000, lambda: 1000), 0.1)
    assert same == pytest.approx(LaneThroughput(rate=1000 / 102, op_seconds=0.0, once=1000 / 102)), "too small to tell"


def test_medians_of_rounds_and_shares_within_each() -> None:
    """The machine is twice as slow in one round: that is no contention."""

    def round_(speed: float) -> MeasurementRound:
        alone = {lane: LaneThroughput(8 * speed, 0.5, 8 * speed) for lane in ("cpu", "h2d")}
        return MeasurementRound(alone, {("cpu", "h2d"): (6 * speed, 9 * speed)})

    alone, keeps = lane_rates.medians([round_(1.0), round_(0.5), round_(1.0)])
    assert alone["cpu"] == LaneThroughput(8.0, 0.5, 8.0)
    assert keeps == {"cpu": {"h2d": 0.75}, "h2d": {"cpu": 1.0}}


def test_an_error_of_the_other_lane_is_told() -> None:
    def broken() -> float:
        raise OSError("gone")

    for works in ([lambda: 1.0, broken], [broken, lambda: 1.0]):
        with pytest.raises(OSError, match="gone"):
            lane_rates.rates_together(works, 0.0)


def test_each_lane_is_counted_while_the_other_is_at_work() -> None:
    """A piece of one lasts until the other has done 50: that one does not rest when it has been counted."""
    pieces, changed = 0, threading.Condition()
    seen: list[bool] = []

    def other() -> float:
        nonlocal pieces
        with changed:
            pieces += 1
            changed.notify()
        return 1.0

    def counted() -> float:
        with changed:
            enough = pieces + 50
            seen.append(changed.wait_for(lambda: pieces >= enough, timeout=60))
        return 1.0

    lane_rates.rates_together([counted, other], 0.0)
    assert len(seen) >= 2, "a first piece that is not counted, and one that is"
    assert all(seen[:2])


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathUnusable):
        measure.calibrate({"disk": tmp_path / "missing"}, **SMALL)
    with pytest.raises(ConfigError, match="lower numel"):
        measure.calibrate(numel=10**14)
    with pytest.raises(ConfigError, match="path='s3://bucket/tide' is an address, not a directory: leave it out"):
        measure.calibrate({"store": "s3://bucket/tide"}, **SMALL)


def calibration(hardware: Mapping[str, str]) -> Calibration:
    card = RateCard(cpu_params_per_second=2e9, overhead_seconds=0.0, keeps={"cpu": {"disk:read": 0.8}})
    return Calibration(card=card, hardware=hardware, cpu_threads={1: 1e9, 2: 2e9}, card_threads=2, measured_at=5.0)


def test_it_is_kept_until_the_hardware_changes(tmp_path: Path) -> None:
    file, hardware = tmp_path / "deep" / "calibration.json", hardware_of({"disk": tmp_path})
    assert load_calibration(file, hardware) is None
    save_calibration(file, calibration(hardware))
    assert load_calibration(file, hardware) == calibration(hardware)
    assert [found.name for found in file.parent.iterdir()] == ["calibration.json"]
    assert load_calibration(file, {**hardware, "cpus": "1024"}) is None
    assert load_calibration(file, hardware_of({"disk": tmp_path, "other": tmp_path})) is None
    for broken in ("", "{}", "[]", json.dumps({**calibration(hardware).to_dict(), "version": 99})):
        file.write_text(broken)
        assert load_calibration(file, hardware) is None
    with pytest.raises(ConfigError, match="cannot be saved"):
        save_calibration(file / "below", calibration(hardware))


GPU: Final = RateCard(
    h2d_bytes_per_second=2e10, d2h_bytes_per_second=2e10, cpu_params_per_second=2e9, device_params_per_second=2e10,
    norm_params_per_second=2e11, overhead_seconds=1e-5, keeps={"cpu": {"h2d": 0.8}},
)  # fmt: skip
SPEEDS: Final = {"disk": PathSpeeds(read_bytes_per_second=2e9, write_bytes_per_second=1e9)}


def test_a_run_begins_with_the_rates_that_are_kept(tmp_path: Path) -> None:
    """So that what-if has an answer before the first step. Those of a set of paths come before those without any."""
    settings = {"disk": PathSettings(directory=tmp_path)}
    hardware = hardware_of()
    assert saved_rate_card(tmp_path, settings, SPEEDS, device="cuda", cpu_threads=2) is None
    without = Calibration(card=GPU, hardware=hardware, cpu_threads={1: 1e9, 2: 2e9}, card_threads=2, measured_at=5.0)
    save_calibration(calibration_file(tmp_path, hardware["host"], {}), without)
    found = saved_rate_card(tmp_path, settings, SPEEDS, device="cuda", cpu_threads=1)
    assert found is not None
    assert found.cpu_params_per_second == 1e9, "of as many threads as the run has"
    assert found.paths["disk"].write_bytes_per_second == 1e9, "as the run has measured it"
    rank = Rank([Subgroup(i, 10**6, 2, 2, 10) for i in range(4)], 2, {"disk": 3})
    assert what_if(rank, EffectiveKnobs(2.0, 0.0), found).update_seconds > 0
    emulated = saved_rate_card(tmp_path, settings, SPEEDS, device="emulated", cpu_threads=2)
    assert emulated is not None
    assert emulated.missing == (
        "h2d_bytes_per_second", "d2h_bytes_per_second", "device_params_per_second", "norm_params_per_second",
    )  # fmt: skip
    calibrated = GPU.with_paths({"disk": PathSpeeds(read_bytes_per_second=4e9, write_bytes_per_second=3e9)})
    here = hardware_of(settings)
    save_calibration(
        calibration_file(tmp_path, here["host"], {"disk": tmp_path}),
        Calibration(card=calibrated, hardware=here, cpu_threads={2: 2e9}, card_threads=2, measured_at=5.0),
    )
    assert saved_rate_card(tmp_path, settings, SPEEDS, device="cuda", cpu_threads=2) == calibrated
    slower = {"disk": PathSettings(directory=tmp_path, threads=1)}
    assert saved_rate_card(tmp_path, slower, SPEEDS, device="cuda", cpu_threads=2) == GPU.with_paths(SPEEDS)


def test_an_attached_run_has_them_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    hardware = hardware_of()
    save_calibration(calibration_file(tmp_path, hardware["host"], {}), calibration(hardware))
    weight = torch.nn.Parameter(torch.zeros(64))
    offload = tidegate.Offload(device="emulated", cpu_threads=1, stride="off")
    with tidegate.AdamW([weight], offload=offload) as optimizer, tidegate.attach(optimizer, run="kept") as attachment:
        recorder = attachment.recorder
        assert recorder.rates is not None
        assert recorder.rates.cpu_params_per_second == 1e9
        weight.sum().backward()
        optimizer.step()
        rates = recorder.rates
        assert rates is not None
        assert rates.cpu_params_per_second != 1e9, "measured by now"
        assert rates.keeps == {}, "live speeds have that in them"


def command(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", "calibrate", *words], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "TIDEGATE_STATE_DIR": str(state)}, check=False,
    )  # fmt: skip


def test_the_command_shows_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    hardware = hardware_of()
    save_calibration(calibration_file(tmp_path, hardware["host"], {}), calibration(hardware))
    calibrate.calibrate(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["measured_now"] is False
    assert Calibration.from_dict(found) == calibration(hardware)
    calibrate.calibrate()
    shown = capsys.readouterr().out
    assert "cpu, 2 threads" in shown
    assert "disk:read 80%" in shown
    assert "No GPU here" in shown
    assert "as in steps" not in shown
    with_device = replace(calibration(hardware), card=RateCard(cpu_params_per_second=2e9, h2d_bytes_per_second=1e10))
    save_calibration(calibration_file(tmp_path, hardware["host"], {}), with_device)
    calibrate.calibrate()
    assert "alone, as in steps" in capsys.readouterr().out


def test_each_set_of_paths_is_kept_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path / "state"))
    measured: list[dict[str, str]] = []

    def measuring(paths: dict[str, str], **_: object) -> Calibration:
        measured.append(paths)
        return calibration(hardware_of(paths))

    monkeypatch.setattr(measure, "calibrate", measuring)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    sets = [[], [f"a={tmp_path}/one"], [f"a={tmp_path}/two"], [f"a={tmp_path}/one", f"b={tmp_path}/two"]]
    for path in (*sets, *sets, [*reversed(sets[-1])]):
        calibrate.calibrate(path=path, as_json=True)
    assert len(measured) == len(sets)


def test_the_command_refuses_what_is_no_path(tmp_path: Path) -> None:
    done = command(tmp_path, "--path", "disk")
    assert (done.returncode, "is not NAME=DIR" in done.stderr) == (2, True)
    with pytest.raises(ConfigError, match="cannot be called"):
        calibrate.calibrate(path=["Host=/tmp"])
    with pytest.raises(ConfigError, match="path='s3://bucket/tide' is an address, not a directory: leave it out"):
        calibrate.calibrate(path=["store=s3://bucket/tide"])
