"""Stage: measures the cost of telemetry. Blocks of iterations with and without an attached agent alternate in one
process. Also lists the link traffic that NVML measures and the bytes that the engine counts, for comparison.

`tidegate.attach` adds recorder, exporter, NVML sampler and hooks. After each block with an agent, /metrics is scraped
once; its cost counts once per scrape interval. The stride is fixed.

* `overhead_ratio`: CPU seconds of telemetry without scrapes, divided by the attached time, plus `scrape_seconds`
  divided by the scrape interval.
* `scrape_seconds`: CPU seconds that a scrape takes in the training process (median).
"""

from __future__ import annotations

import statistics
import time
import urllib.request
from itertools import pairwise
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import tidegate
from bench.gpu.shapes import SHAPES
from bench.gpu.sides import Ask, build, cap_memory
from bench.gpu.target import Target, run_stage

BLOCK = 4
TARGET = 0.005
SCRAPE_INTERVAL = 5.0
"""Seconds between two scrapes, as in grafana/prometheus/prometheus.yml."""
CLOSING_SECONDS = 0.05
"""The exporter counts the CPU seconds of a connection after the client has its answer; much less than this later."""


def stage(target: Target) -> dict[str, Any]:
    ask = Ask(side="tidegate", shape=SHAPES["toy" if target.dry else "1b"], dry=target.dry, stride=2.0)
    cap_memory(ask)
    training = build(ask)
    training.attachment.close()
    blocks: dict[bool, list[float]] = {False: [], True: []}
    costs, attached_seconds = 0.0, 0.0
    scrapes: list[float] = []
    gpu: dict[str, float] = {}
    for _ in range(2):
        training.iteration()
    for watched in (False, True, True, False) * target.sized(6, 1):
        attachment = tidegate.attach(training.optimizer, training.model, run="bench-watching") if watched else None
        began = time.monotonic()
        training.iteration()
        target.finish_enqueued()
        times = [time.monotonic()]
        for _ in range(BLOCK):
            training.iteration()
            target.finish_enqueued()
            times.append(time.monotonic())
        blocks[watched] += [after - before for before, after in pairwise(times)]
        if attachment is not None:
            costs += attachment.overhead_seconds
            attached_seconds += time.monotonic() - began
            before = attachment.overhead["exporter"]
            gpu |= of_gpu(attachment.metrics_address)
            time.sleep(CLOSING_SECONDS)
            scrapes.append(attachment.overhead["exporter"] - before)
            attachment.close()
    training.close()
    with_it, without = (statistics.median(blocks[watched]) for watched in (True, False))
    return {
        "step_seconds": without,
        "paired_ratio": with_it / without - 1,
        "overhead_ratio": costs / attached_seconds + statistics.median(scrapes) / SCRAPE_INTERVAL,
        "scrape_seconds": statistics.median(scrapes),
        "target": TARGET,
        "nvml": gpu,
    }


def of_gpu(address: str) -> dict[str, float]:
    """Scrapes /metrics at `address`. Returns the values of NVML's metrics and of the engine's link bytes, by name and
    labels of the metric."""
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    wanted = ("tidegate_gpu_", "tidegate_link_bytes")
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sample.labels.items()): sample.value
        for family in families
        if family.name.startswith(wanted)
        for sample in family.samples
    }


if __name__ == "__main__":
    run_stage(stage)
