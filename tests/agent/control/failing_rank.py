"""One rank that trains and ends in the way that a test asks for: see test_failures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import torch

import tidegate


class StateGone(Exception):
    """As an exception of a library: with a text that nobody else may see."""


def started(run: str, daemon: str, num_steps: int = 2) -> tuple[tidegate.AdamW, Any]:
    params = [torch.nn.Parameter(torch.zeros(64))]
    optimizer = tidegate.AdamW(params)
    attachment = tidegate.attach(optimizer, run=run, daemon=daemon, strict=True)
    for _ in range(num_steps):
        params[0].grad = torch.ones(64)
        optimizer.step()
    return optimizer, attachment


def child(run: str, daemon: str, how: str) -> None:
    _kept = started(run, daemon)
    if how == "child-exit":
        sys.exit(3)
    raise StateGone("secret")


def main(run: str, daemon: str, how: str) -> None:
    if how.startswith("child"):
        process = multiprocessing.get_context("spawn").Process(target=child, args=(run, daemon, how))
        process.start()
        process.join()
        return
    if how == "ranks":
        torch.distributed.init_process_group("gloo")
    optimizer, attachment = started(run, daemon, 0 if how == "before a step" else 2)
    if os.environ.get("RANK") == "1":
        time.sleep(600)  # until the launcher ends it
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise" | "ranks" | "before a step":
            raise StateGone("secret")
        case "with":
            with contextlib.suppress(StateGone), optimizer:
                raise StateGone("secret")
        case "with-attachment":
            with contextlib.suppress(StateGone), attachment:
                raise StateGone("secret")
        case "with-exit":
            with optimizer:
                sys.exit(1)
        case "finally":
            try:
                raise StateGone("secret")
            finally:
                optimizer.close()
        case "interrupt":
            raise KeyboardInterrupt
        case "exit":
            with optimizer:
                sys.exit(0)
        case "iterator":
            try:
                next(iter(()))
            except StopIteration:
                optimizer.close()
        case "handled":
            try:
                raise StateGone("secret")
            except StateGone:
                pass
            optimizer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
