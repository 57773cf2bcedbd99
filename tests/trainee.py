"""A training run to look at: real steps on an emulated device with state on storage paths, until SIGTERM or a kill.

The device is slow enough that it makes the pace, not this machine's processors.
"""

from __future__ import annotations

import argparse
import signal
import threading

import torch

import tidegate
from tidegate.agent.control import link_timing

ROWS = 32
"""Of a batch; each counts as so many tokens as the network is wide."""


class Network(torch.nn.Module):
    """Returns its loss, as transformers do."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(num_layers)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(inputs) - inputs).square().mean()
        return loss


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--path", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--wear-bytes-per-day", type=int, default=0, help="limit of each path; 0 for none")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--link-bytes-per-second", type=float, required=True, help="each way")
    parser.add_argument("--update-params-per-second", type=float, required=True, help="of the device")
    parser.add_argument("--stride", type=float, required=True)
    parser.add_argument("--subgroup-numel", type=int, required=True)
    parser.add_argument("--host-cache", required=True)
    parser.add_argument("--tier-split", default="auto")
    parser.add_argument("--report-seconds", type=float, help="how often, however much a report costs")
    return parser.parse_args()


def offload(options: argparse.Namespace) -> tidegate.Offload:
    words = (word.split("=", 1) for word in options.path)
    return tidegate.Offload(
        device="emulated",
        emulated=tidegate.EmulatedRates(
            h2d_bytes_per_second=options.link_bytes_per_second,
            d2h_bytes_per_second=options.link_bytes_per_second,
            update_params_per_second=options.update_params_per_second,
        ),
        stride=options.stride,
        subgroup_numel=options.subgroup_numel,
        cpu_threads=1,
        paths={
            name: tidegate.PathSettings(directory=directory, wear_bytes_per_day=options.wear_bytes_per_day)
            for name, directory in words
        },
        tier_split=options.tier_split,
        host_cache=options.host_cache,
    )


def main() -> None:
    options = parsed()
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    if options.report_seconds:
        link_timing.REPORT_SECONDS = link_timing.LONGEST_REPORT_SECONDS = options.report_seconds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Network(options.width, options.layers)
    with tidegate.AdamW(model.parameters(), lr=1e-3, offload=offload(options)) as optimizer:
        attachment = tidegate.attach(optimizer, model, run=options.run, daemon=options.daemon)
        while not end.is_set():
            optimizer.zero_grad()
            loss = model(torch.randn(ROWS, options.width))
            loss.backward()
            optimizer.log(loss=loss.item(), tokens=ROWS * options.width)
            optimizer.step()
            end.wait(0.05)
        attachment.close()


if __name__ == "__main__":
    main()
