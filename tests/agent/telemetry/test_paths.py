"""Metrics of storage paths, held against what was seen at their boundary and at the kernel's: real files."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tidegate
from tests.agent.engine.test_exactness import FAST
from tests.agent.optimizer.test_optimizer import params_of, run_steps
from tests.agent.training import Training, batch
from tests.services import program, until
from tidegate.agent.telemetry import paths as path_telemetry
from tidegate.agent.telemetry.paths import MIN_WRITE_RATE_SECONDS, WRITE_RATE_WINDOW_SECONDS, WriteRate
from tidegate.agent.tiers import state_reads
from tidegate.agent.tiers.file_moves import FileMover
from tidegate.agent.tiers.transfers import Transfer
from tidegate.errors import ConfigError
from tidegate.metrics.catalogue import METRICS
from tidegate.timeline.bytes_by_phase import divide_by_phase, start_of, totals_by_phase
from tidegate.timeline.timeline import PhaseSpan
from tidegate.wire.step import StepReport

STEPS = 8
PATHS = ("nvme", "pfs")
LANES = [(path, operation) for path in PATHS for operation in ("read", "write")]
Row = tuple[dict[str, str], float]


def training(folder: Path, **changes: Any) -> Training:
    for name in PATHS:
        (folder / name).mkdir(parents=True)
    settings: dict[str, Any] = {"host_cache": 7_000_000, "tier_split": "nvme:2,pfs:1"}
    return Training(paths={name: folder / name for name in PATHS}, **{**settings, **changes})


def kernel_bytes() -> dict[str, int]:
    """What this process had storage read and write, as the kernel counts it: not what came from the page cache."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(rows["read_bytes"]), "write": int(rows["write_bytes"])}


def moved_bytes(made: Training) -> Iterator[int]:
    """Of each path and operation, as the path itself counted it."""
    store = made.optimizer.engine.store
    for path in store.paths.values() if store is not None else ():
        yield from path.counters.bytes.values()


class Run:
    """A training that has run its steps, and what was scraped of it."""

    def __init__(self, training: Training, name: str = "paths") -> None:
        self.training = training
        self.attachment = tidegate.attach(training.optimizer, training.model, run=name)
        before = kernel_bytes()
        for _ in range(STEPS):
            training.optimizer.log(loss=1.0)
            training.step()
        after = kernel_bytes()
        self.kernel = {operation: after[operation] - before[operation] for operation in after}

    def scrape(self) -> str:
        return httpx.get(f"http://{self.attachment.metrics_address}/metrics", trust_env=False).text

    def samples(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = defaultdict(list)
        for family in text_string_to_metric_families(self.scrape()):
            for sample in family.samples:
                found[sample.name].append((sample.labels, sample.value))
        return found

    def value(self, name: str, **labels: str) -> float:
        return sum(value for found, value in self.samples()[name] if labels.items() <= found.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    first = training(tmp_path_factory.mktemp("first"))
    with first.optimizer:
        first.step()  # Code that is not in memory yet is read from storage, too, and the kernel counts that.
    made = training(tmp_path_factory.mktemp("paths"))
    with made.optimizer:
        yield Run(made)


def test_bytes_are_those_that_crossed_the_boundary_in_each_phase_and_in_all(run: Run) -> None:
    outside = run.training.outside
    for path, operation in LANES:
        lane = f"{path}:{operation}"
        assert run.value("tidegate_path_bytes_total", path=path, operation=operation) == outside.lane_bytes[lane] > 0
        for phase in ("forward", "backward", "update"):
            said = run.value("tidegate_path_bytes_total", path=path, operation=operation, phase=phase)
            assert said == pytest.approx(outside.link_bytes[lane, phase], rel=0.01, abs=1000), (lane, phase)


def test_bytes_are_those_that_the_kernel_moved(run: Run) -> None:
    if not min(run.kernel.values()):
        pytest.skip("the test directory is on no block device: the kernel counts nothing")
    for operation in ("read", "write"):
        assert run.value("tidegate_path_bytes_total", operation=operation) == pytest.approx(
            run.kernel[operation], rel=0.03
        )


def test_busy_time_is_that_of_the_transfers(run: Run) -> None:
    for path, operation in LANES:
        busy = run.value("tidegate_path_busy_seconds_total", path=path, operation=operation)
        assert busy == pytest.approx(run.training.outside.lane_seconds[f"{path}:{operation}"], rel=1e-6)
        ceiling = run.value("tidegate_path_ceiling_bytes_per_second", path=path, operation=operation)
        assert ceiling > 0


def test_the_ceiling_stays_what_it_was_when_live_speeds_change(run: Run) -> None:
    store = run.training.optimizer.engine.store
    assert store is not None
    assert store.speeds != store.ceilings
    for path in PATHS:
        said = run.value("tidegate_path_ceiling_bytes_per_second", path=path, operation="read")
        assert said == store.ceilings[path].read_bytes_per_second


def test_every_family_has_only_labels_of_this_runs_paths(run: Run) -> None:
    families = {family.name: family for family in text_string_to_metric_families(run.scrape())}
    by_name = {metric.name.removesuffix("_total"): metric for metric in METRICS if metric.needs != "nvml"}
    assert {name for name in families if name.startswith("tidegate_")} == set(by_name)
    for name, metric in by_name.items():
        assert len(families[name].samples) <= metric.max_series(PATHS), name
        for sample in families[name].samples:
            for label, value in sample.labels.items():
                assert label == "le" or value in metric.values(label, PATHS), sample
    causes = {labels["cause"] for labels, _ in run.samples()["tidegate_stall_seconds_total"]}
    assert {f"{path}:{operation}" for path, operation in LANES} <= causes


def test_promtool_accepts_it_and_series_are_few(run: Run) -> None:
    text = run.scrape()
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 600


def test_where_state_lives_and_what_the_knobs_are(run: Run) -> None:
    optimizer = run.training.optimizer
    for where in ("host", "device", *PATHS):
        assert run.value("tidegate_subgroups", residence=where) == optimizer.engine.memory.residence.count(where)
    assert run.value("tidegate_tier_share", path="nvme", state="desired") == pytest.approx(2 / 3)
    counts = optimizer.engine.residences.counts  # type: ignore[union-attr]
    effective = run.value("tidegate_tier_share", path="nvme", state="effective")
    assert effective == pytest.approx(counts["nvme"] / sum(counts.values()))
    assert run.value("tidegate_knob", knob="host_cache_bytes", state="effective") == 7_000_000
    # The tuner may be trying either.
    alternate = optimizer.engine.effective.alternate
    assert run.value("tidegate_knob", knob="alternate_order", state="effective") == alternate
    assert not [row for row in run.samples()["tidegate_knob"] if row[0]["knob"] == "alternate_order"][1:], (
        "auto: absent"
    )
    assert run.value("tidegate_host_memory_bytes", kind="slot") > 0


@pytest.mark.parametrize(("order", "shown"), [("alternate", 1.0), ("pinned", 0.0)])
def test_an_order_that_was_chosen_is_a_number_among_the_knobs(tmp_path: Path, order: str, shown: float) -> None:
    made = training(tmp_path, order=order)
    with made.optimizer:
        run = Run(made, order)
        for state in ("desired", "effective"):
            assert run.value("tidegate_knob", knob="alternate_order", state=state) == shown


def test_free_space_is_what_the_file_system_says(run: Run) -> None:
    for path in run.training.optimizer.engine.store.paths.values():  # type: ignore[union-attr]
        found = os.statvfs(path.settings.directory)
        said = run.value("tidegate_path_free_bytes", path=path.name)
        assert said == pytest.approx(found.f_bavail * found.f_frsize, rel=0.05)


def test_a_checkpoint_is_counted_in_its_phase(tmp_path: Path) -> None:
    made = training(tmp_path)
    with made.optimizer:
        run = Run(made)
        before = made.outside.lane_bytes.total()
        stored = sum(
            -(-s.nbytes("state") // 4096) * 4096
            for s, where in zip(made.optimizer.engine.subgroups, made.optimizer.engine.memory.residence, strict=True)
            if where in PATHS
        )
        made.optimizer.state_dict()
        made.step()  # the tuner may be trying an order in which others are stored after it
        read = run.value("tidegate_path_bytes_total", operation="read", phase="checkpoint")
        assert read == stored > 0
        assert before < made.outside.lane_bytes.total()


def test_what_a_checkpoint_reads_in_the_background_is_no_read_of_a_subgroups_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are counted, and the read that is under way is seen; but how long state takes, pieces do not say."""
    under_way: list[list[str]] = []
    tried = state_reads._retried

    def watched(begin: Any) -> Any:
        paths = store.paths.values()
        under_way.append([operation for path in paths for operation, _ in tuple(path.counters.under_way.values())])
        return tried(begin)

    monkeypatch.setattr(state_reads, "_retried", watched)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as elsewhere:  # nothing can be linked
        made = training(Path(elsewhere), host_cache=0)
        with made.optimizer as optimizer:
            run, store = Run(made), optimizer.engine.store
            assert store is not None

            def counted() -> tuple[float, float]:
                made.step()
                return run.value("tidegate_path_operation_seconds_count"), run.value("tidegate_path_bytes_total")

            (operations, nbytes), (more_operations, more_bytes) = counted(), counted()
            optimizer.begin_checkpoint(tmp_path / "saved", memory_bytes=0).result()
            last_operations, last_bytes = counted()
    assert under_way
    assert all("read" in operations for operations in under_way)
    assert last_operations - more_operations == more_operations - operations > 0
    assert last_bytes - more_bytes > more_bytes - nbytes


def test_a_read_that_hangs_is_seen_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = training(tmp_path, host_cache=0)
    hangs, release = threading.Event(), threading.Event()
    moved = FileMover._transfer

    def hanging(mover: FileMover, *of: Any) -> Any:
        if mover.path == "nvme" and ("read", mover.path) not in seen:
            operations = {operation for operation, _ in tuple(mover.counters.under_way.values())}
            if "read" in operations:
                seen.add(("read", mover.path))
                hangs.set()
                assert release.wait(60)
        return moved(mover, *of)

    seen: set[tuple[str, str]] = set()
    with made.optimizer:
        run = Run(made)

        def busy() -> float:
            return run.value("tidegate_path_busy_seconds_total", path="nvme", operation="read")

        before, nbytes = busy(), run.value("tidegate_path_bytes_total")
        monkeypatch.setattr(FileMover, "prepare", lambda *_: None)  # all transfers go by Python
        monkeypatch.setattr(FileMover, "_transfer", hanging)
        made.start()
        try:
            assert hangs.wait(60)
            until(lambda: busy() > before + 0.2, "time of the read that hangs")
            until(
                lambda: run.value("tidegate_path_open_seconds", path="nvme", operation="read") > 0.2, "the read's time"
            )
            until(lambda: run.value("tidegate_phase_open_seconds") > 0.2, "the phase's time")
            assert run.value("tidegate_step_open_seconds") > 0.2
            hung = busy()
            moved_so_far = run.value("tidegate_path_bytes_total")
        finally:
            release.set()
            made.stop()
        assert busy() >= hung, "what was shown never goes back"
        assert run.value("tidegate_path_open_seconds") == 0
        assert nbytes <= moved_so_far <= run.value("tidegate_path_bytes_total") == sum(moved_bytes(made))


def test_where_locks_are_impossible_no_lock_slots_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(tmp_path / "locked").optimizer as optimizer:
        assert {path.lock_slots for path in optimizer.engine.store.paths.values()} == {1}
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with training(tmp_path / "not").optimizer as optimizer:
        assert {path.lock_slots for path in optimizer.engine.store.paths.values()} == {0}


def test_what_has_moved_in_a_phase_is_shown_before_it_ends(tmp_path: Path) -> None:
    """After the backward pass nothing of the step is recorded; what it has fetched is there."""
    made = training(tmp_path, host_cache=0)
    with made.optimizer as optimizer:
        run = Run(made)
        path = optimizer.engine.store.paths["nvme"]  # type: ignore[union-attr]
        recorded = run.value("tidegate_path_bytes_total", path="nvme")
        assert recorded == path.counters.bytes["read"] + path.counters.bytes["write"]
        optimizer.zero_grad()
        made.model(batch(0)).backward()
        until(lambda: path.counters.moves, "a fetch in the backward pass")
        until(lambda: run.value("tidegate_path_bytes_total", path="nvme") > recorded, "its bytes")
        optimizer.step()
        moved = path.counters.bytes["read"] + path.counters.bytes["write"]
        assert run.value("tidegate_path_bytes_total", path="nvme") == moved > recorded


def test_attempts_that_fail_are_counted_where_they_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real pool, and a ticket that says what a disk that has a bad moment would."""
    made = training(tmp_path)
    with made.optimizer:
        run = Run(made)
        check, failures = FileMover._check, [errno.EIO, errno.EIO]

        def bad_moment(mover: FileMover, operation: Any, file: Any, address: int, ticket: Any) -> None:
            if failures and (mover.path, operation) == ("pfs", "write"):
                said = SimpleNamespace(
                    ok=False, failed_block=0, checksum_mismatch=False, end_of_file=False, error=failures.pop()
                )
                check(mover, operation, file, address, said)  # type: ignore[arg-type]
            check(mover, operation, file, address, ticket)

        monkeypatch.setattr(FileMover, "prepare", lambda *_: None)  # all transfers go by Python
        monkeypatch.setattr(FileMover, "_check", bad_moment)
        made.step()
        assert not failures
        assert run.value("tidegate_path_errors_total", path="pfs", operation="write") == 2
        assert run.value("tidegate_path_errors_total") == 2


def test_a_report_of_an_agent_without_paths_still_reads() -> None:
    report = StepReport.model_validate({"step": 1, "timestamp": 0.0, "phase_seconds": {}})
    assert (report.paths, report.path_states) == ((), ())


def test_what_is_divided_adds_up() -> None:
    phases = [PhaseSpan("forward", 0.0, 1.0), PhaseSpan("backward", 1.0, 3.0), PhaseSpan("update", 3.0, 3.5)]
    parts = list(divide_by_phase(PhaseSpan("other", 0.5, 3.25), 1003, phases))
    assert [phase for phase, _, _ in parts] == ["forward", "backward", "update"]
    assert sum(nbytes for _, nbytes, _ in parts) == 1003
    assert sum(seconds for _, _, seconds in parts) == pytest.approx(2.75)


def test_time_of_transfers_that_overlap_counts_once_and_their_bytes_where_they_moved() -> None:
    phases = [PhaseSpan("backward", 0.0, 2.0), PhaseSpan("update", 2.0, 10.0)]
    moves = [
        (("nvme", "read"), Transfer(0.5, 1.5, 10, 0.0)),
        (("nvme", "read"), Transfer(0.0, 4.0, 100, 0.0)),
        (("nvme", "write"), Transfer(1.0, 3.0, 8, 0.0)),
    ]
    found = totals_by_phase(sorted(moves, key=start_of), phases)
    assert {(operation, phase): total.nbytes for ((_, operation), phase), total in found.items()} == {
        ("read", "backward"): 60, ("read", "update"): 50, ("write", "backward"): 4, ("write", "update"): 4,
    }  # fmt: skip
    assert {(operation, phase): total.seconds for ((_, operation), phase), total in found.items()} == {
        ("read", "backward"): 2.0, ("read", "update"): 2.0, ("write", "backward"): 1.0, ("write", "update"): 1.0,
    }  # fmt: skip


def test_wear_is_the_pace_of_the_last_hour_and_its_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tidegate")
    wear = WriteRate("nvme", 200 * 86_400, 0.0, 1_000)
    assert wear.per_day(MIN_WRITE_RATE_SECONDS / 2, 10**9) is None
    assert wear.per_day(100.0, 1_000 + 100 * 100) == pytest.approx(100 * 86_400)
    assert not caplog.records
    now, written = 100.0, 11_000
    while now < 3 * WRITE_RATE_WINDOW_SECONDS:
        now, written = now + 20.0, written + (100 if now < WRITE_RATE_WINDOW_SECONDS else 300) * 20
        last = wear.per_day(now, written)
    assert last == pytest.approx(300 * 86_400, rel=0.01), "what was written more than an hour ago is forgotten"
    assert ["nvme" in r.message and "wear_bytes_per_day=17,280,000" in r.message for r in caplog.records] == [True]


def test_a_run_that_wears_out_a_drive_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(path_telemetry, "MIN_WRITE_RATE_SECONDS", 0.0)
    path = tidegate.PathSettings(directory=tmp_path, wear_bytes_per_day=1_000_000)
    made = Training(paths={"ssd": path}, host_cache=0)
    with made.optimizer:
        run = Run(made)
        last = run.attachment.recorder.totals.last
        assert last is not None
        wear = run.value("tidegate_path_written_bytes_per_day", path="ssd")
        assert wear == last.path_states[0].written_bytes_per_day > 1_000_000
    assert sum("wear_bytes_per_day=1,000,000" in record.message for record in caplog.records) == 1


def test_a_wear_limit_is_checked() -> None:
    with pytest.raises(ConfigError, match="wear_bytes_per_day=-1"):
        tidegate.PathSettings(directory="/", wear_bytes_per_day=-1)


def test_a_directory_that_is_gone_does_not_end_the_figures(tmp_path: Path) -> None:
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir()
    params = params_of((400,))
    offload = tidegate.Offload(
        subgroup_numel=50, emulated=FAST, host_cache=0, paths={name: tmp_path / name for name in ("nvme", "pfs")}
    )
    with (
        tidegate.AdamW(params, offload=offload) as optimizer,
        tidegate.attach(optimizer, run="gone") as attachment,
    ):
        run_steps(optimizer, params, 0, 2)
        shutil.rmtree(tmp_path / "pfs")
        run_steps(optimizer, params, 2, 3)
        steps = attachment.recorder.take_unreported()
        assert len(steps) == 5
        assert [{state.path: state.free_bytes > 0 for state in step.path_states} for step in steps[-2:]] == [
            {"nvme": True, "pfs": False}
        ] * 2
        assert attachment.recorder.rows("tidegate_path_bytes_total")["nvme", "write", "update"] > 0
