"""Five steps of an attached optimizer that nobody closes, and an end, for test_rank_ownership."""

from __future__ import annotations

import os
import signal
import sys

import torch

import tidegate

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def train(run: str, daemon: str, token: str) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    model = torch.nn.Linear(8, 8)
    optimizer = tidegate.AdamW(model.parameters(), offload=tidegate.Offload(device="emulated"))
    tidegate.attach(optimizer, model, run=run, daemon=daemon, token=token)
    kept.append(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    assert [signal.getsignal(number) for number in SIGNALS] == handlers, "signals are the program's"


def rank(_: int, *given: str) -> None:
    train(*given)


kept: list[object] = []

if __name__ == "__main__":
    url, secret, name, end = sys.argv[1:]
    if end == "spawned":
        torch.multiprocessing.spawn(rank, (name, url, secret))  # type: ignore[attr-defined]
    else:
        train(name, url, secret)
    if end == "raise":
        raise ValueError("on purpose")
    if end == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if end == "exit":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        os.kill(os.getpid(), signal.SIGTERM)
