"""Bytes of storage paths as a real Prometheus has them, against the kernel's count and the plans'."""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import tidegate
from tests.agent.telemetry.test_paths import LANES, PATHS, kernel_bytes
from tests.agent.training import Training
from tests.services import Prometheus, free_port, program, until
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.timeline.timeline import PHASES

WARM_UP_STEPS = 3
"""The first fetch of a state reads nothing: it is zeros. The planner may think anew of the paths' speeds."""
STEPS = 10


@contextlib.contextmanager
def prometheus_of(target: str, folder: Path) -> Iterator[Prometheus]:
    """One that scrapes this target alone, as OpenMetrics and with exemplars."""
    port, config = free_port(), folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        f"scrape_configs: [{{job_name: rank, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    command = [
        program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={})
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        until(lambda: _is_up(found), "the first scrape")
        yield found
    finally:
        process.terminate()
        process.wait(20)


def _is_up(found: Prometheus) -> bool:
    try:
        return found.value("up") == 1
    except (httpx.HTTPError, ValueError):  # while it starts it answers 503, in words
        return False


class Truth:
    """What the kernel and the plans say of some steps."""

    def __init__(self, made: Training) -> None:
        self.planned: Counter[str] = Counter()
        made.optimizer.observers.append(self._note)
        before = kernel_bytes()
        for _ in range(STEPS):
            made.step()
        after = kernel_bytes()
        made.optimizer.observers.remove(self._note)
        self.kernel = {operation: after[operation] - before[operation] for operation in after}

    def _note(self, result: StepResult, _: StepPhases) -> None:
        for op in result.plan.ops:
            if op.path is not None:
                self.planned[op.lane] += op.nbytes


@pytest.mark.slow
@pytest.mark.alone  # times of two watchers are held against each other
def test_bytes_in_prometheus_are_the_kernels_less_what_else_the_process_does_and_the_plans(tmp_path: Path) -> None:
    without = Training()
    with without.optimizer:
        for _ in range(WARM_UP_STEPS):
            without.step()
        else_moved = Truth(without).kernel
    for name in PATHS:
        (tmp_path / name).mkdir()
    paths = {name: tmp_path / name for name in PATHS}
    made = Training(paths=paths, host_cache=0, tier_split="nvme:2,pfs:1")
    with (
        made.optimizer,
        tidegate.attach(made.optimizer, made.model, run="bytes") as attachment,
        prometheus_of(attachment.metrics_address, tmp_path) as prometheus,
    ):
        for _ in range(WARM_UP_STEPS):
            made.step()
        before, io = scraped(prometheus, made.steps), Counter[str]()
        io.subtract(process_io(prometheus))
        seen, longer = Counter(made.outside.link_bytes), dict(made.outside.longer_seconds)
        truth = Truth(made)
        after = scraped(prometheus, made.steps)
        io.update(process_io(prometheus))
        exemplars = httpx.get(
            f"{prometheus.url}/api/v1/query_exemplars",
            params={"query": "tidegate_phase_seconds_bucket", "start": "0", "end": "9999999999"},
            trust_env=False,
        ).json()
    moved = after - before
    for path, operation in LANES:
        lane = f"{path}:{operation}"
        total = sum(moved[path, operation, phase] for phase in PHASES)
        assert total == pytest.approx(truth.planned[lane], rel=0.01), lane
        for phase in ("forward", "backward", "update"):
            outside = made.outside.link_bytes[lane, phase] - seen[lane, phase]
            assert moved[path, operation, phase] == pytest.approx(outside, abs=0.01 * total), (lane, phase)
    for phase in ("forward", "backward", "update"):
        assert abs(made.outside.longer_seconds[phase] - longer[phase]) < 0.1, phase
    assert {e["labels"]["step"] for series in exemplars["data"] for e in series["exemplars"]}
    if not min(truth.kernel.values()):
        pytest.skip("the test directory is on no block device: the kernel counts nothing")
    for operation in ("read", "write"):
        assert io[operation] == pytest.approx(truth.kernel[operation], rel=0.01)
        total = sum(moved[path, operation, phase] for path in PATHS for phase in PHASES)
        assert total == pytest.approx(truth.kernel[operation] - else_moved[operation], rel=0.01), operation


def scraped(prometheus: Prometheus, steps: int) -> Counter[tuple[str, str, str]]:
    """Bytes by path, operation and phase, once all of these steps are in a scrape."""
    until(lambda: prometheus.value("tidegate_steps_total") == steps, "the scrape of the last step")
    rows = prometheus.query("tidegate_path_bytes_total")
    return Counter({(row["path"], row["operation"], row["phase"]): int(row["value"]) for row in rows})


def process_io(prometheus: Prometheus) -> dict[str, int]:
    """The kernel's count, as the rank exports it."""
    return {row["operation"]: int(row["value"]) for row in prometheus.query("tidegate_process_io_bytes_total")}
