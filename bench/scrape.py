"""Claim: a scrape of a rank with four storage paths takes less than 10 ms, and gives at most 600 series.

A real training run has four directories as paths. Another process scrapes it as Prometheus does, before training and
during it. The measured time is the wait of that process for the whole answer: it includes collecting, formatting, the
network stack and, during training, the wait for the Python interpreter. `cpu_milliseconds`: CPU time of the exporter's
threads for each scrape.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

import tidegate
from tidegate.metrics.family import MAX_SERIES

TARGET_MILLISECONDS = 10.0
PATHS = ("nvme", "pfs", "scratch", "burst")
SUBGROUPS = 64
SUBGROUP_NUMEL = 50_000
WARM_UP_STEPS = 5
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


class Training:
    """A training without a model: steps of the optimizer with constant gradients. As a context manager, it trains in a
    thread."""

    def __init__(self, folder: Path) -> None:
        for name in PATHS:
            (folder / name).mkdir()
        self.params = [torch.nn.Parameter(torch.zeros(SUBGROUP_NUMEL)) for _ in range(SUBGROUPS)]
        self.optimizer = tidegate.AdamW(
            self.params,
            offload=tidegate.Offload(
                subgroup_numel=SUBGROUP_NUMEL,
                device="emulated",
                host_cache=SUBGROUPS * SUBGROUP_NUMEL * 2,
                tier_split=",".join(f"{name}:1" for name in PATHS),
                paths={name: folder / name for name in PATHS},
            ),
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def step(self) -> None:
        for param in self.params:
            param.grad = torch.ones_like(param)
        self.optimizer.log(loss=1.0, tokens=1)
        self.optimizer.step()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.step()


def scrape(port: int, times: int, pause: float, out: Any) -> None:
    """Scrapes /metrics `times` times, with pauses of `pause` seconds. Puts the seconds of each scrape, and the last
    answer, into the queue `out`."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": ACCEPT})
    seconds = []
    for _ in range(times):
        time.sleep(pause)
        began = time.perf_counter()
        with opener.open(request, timeout=30) as answer:
            text = answer.read().decode()
        seconds.append(time.perf_counter() - began)
    out.put((seconds, text))


def scrapes(attachment: tidegate.Attachment, times: int, pause: float) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    port = int(attachment.metrics_address.rpartition(":")[2])
    before = attachment.overhead["exporter"]
    process = context.Process(target=scrape, args=(port, times, pause, out))
    process.start()
    seconds, text = out.get(timeout=600)
    process.join()
    milliseconds = sorted(1e3 * value for value in seconds)
    return {
        "milliseconds": {
            "median": round(statistics.median(milliseconds), 3),
            "p95": round(milliseconds[int(0.95 * (len(milliseconds) - 1))], 3),
            "max": round(milliseconds[-1], 3),
        },
        "cpu_milliseconds": round(1e3 * (attachment.overhead["exporter"] - before) / times, 3),
        "series": sum(bool(line) and not line.startswith("#") for line in text.splitlines()),
        "bytes": len(text),
    }


def measure(times: int, pause: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder))
        with training.optimizer as optimizer, tidegate.attach(optimizer, run="scrape") as attachment:
            for _ in range(WARM_UP_STEPS):
                training.step()
            at_rest = scrapes(attachment, times, pause)
            with training:
                in_training = scrapes(attachment, times, pause)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    worst = max(at_rest["series"], in_training["series"])
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "paths": len(PATHS),
        "subgroups": SUBGROUPS,
        "scrapes": times,
        "at_rest": at_rest,
        "in_training": in_training,
        "series": worst,
        "series_bound": MAX_SERIES,
        "meets_target": at_rest["milliseconds"]["median"] < TARGET_MILLISECONDS and worst <= MAX_SERIES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100, help="scrapes at rest, and as many in training")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between them")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    print(json.dumps(measure(options.times, options.pause), indent=None if options.json else 2))


if __name__ == "__main__":
    main()
