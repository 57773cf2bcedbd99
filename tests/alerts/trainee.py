"""The training run of the scenario: real steps with state on two storage paths, until it is told to end or is killed.

The device is emulated, slow enough that its updates, and not this machine's processors, make the pace.
"""

from __future__ import annotations

import argparse
import signal
import threading

import torch

import tidegate

WIDTH = 320
NUM_LAYERS = 2
RATES = {"h2d_bytes_per_second": 1e10, "d2h_bytes_per_second": 1e10, "update_params_per_second": 2e6}
WEAR_BYTES_PER_DAY = 4_000_000_000_000


def settings(directory: str) -> tidegate.PathSettings:
    """With a limit on wear, so that the family that tells it is there."""
    return tidegate.PathSettings(directory=directory, wear_bytes_per_day=WEAR_BYTES_PER_DAY)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--path", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--tier-split", required=True)
    options = parser.parse_args()
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = tidegate.AdamW(
        model.parameters(),
        lr=1e-3,
        offload=tidegate.Offload(
            device="emulated",
            emulated=tidegate.EmulatedRates(**RATES),
            stride=1.0,
            subgroup_numel=25_000,
            cpu_threads=1,
            paths={name: settings(directory) for name, directory in (word.split("=", 1) for word in options.path)},
            tier_split=options.tier_split,
            host_cache=0,
        ),
    )
    with optimizer:
        attachment = tidegate.attach(optimizer, model, run=options.run, daemon=options.daemon)
        while not end.is_set():
            optimizer.zero_grad()
            model(torch.randn(16, WIDTH)).square().mean().backward()
            optimizer.step()
            end.wait(0.05)
        attachment.close()


if __name__ == "__main__":
    main()
