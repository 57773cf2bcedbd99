"""A training run to look at: real steps on an emulated device that is no help, until SIGTERM.

The device makes the pace, not this machine's processors: `stride=off` shortens the update whatever else runs here.
"""

from __future__ import annotations

import argparse
import signal
import threading

import torch

import tidegate
from tidegate.agent import link

WIDTH = 384
NUM_LAYERS = 3
RATES = {"h2d_bytes_per_second": 4e8, "d2h_bytes_per_second": 4e8, "update_params_per_second": 3e6}
REPORT_SECONDS = 0.3


class Network(torch.nn.Module):
    """Returns its loss, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(inputs) - inputs).square().mean()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--path", action="append", required=True, metavar="NAME=DIR")
    options = parser.parse_args()
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    link.REPORT_SECONDS = link.LONGEST_REPORT_SECONDS = REPORT_SECONDS
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Network()
    optimizer = tidegate.AdamW(
        model.parameters(),
        lr=1e-3,
        offload=tidegate.Offload(
            device="emulated",
            emulated=tidegate.EmulatedRates(**RATES),
            stride=1.5,
            subgroup_numel=40_000,
            cpu_threads=1,
            paths=dict(word.split("=", 1) for word in options.path),
            host_cache="2MiB",
        ),
    )
    with optimizer:
        attachment = tidegate.attach(optimizer, model, run=options.run, daemon=options.daemon)
        while not end.is_set():
            optimizer.zero_grad()
            loss = model(torch.randn(32, WIDTH))
            loss.backward()
            optimizer.log(loss=loss.item(), tokens=32 * WIDTH)
            optimizer.step()
            end.wait(0.03)
        attachment.close()


if __name__ == "__main__":
    main()
