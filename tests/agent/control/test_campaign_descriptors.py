"""A rank whose file descriptors run out again and again: named errors only, and training and `/metrics` go on after."""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

import tidegate
from tests.agent.checkpoints.refused import descriptors_left
from tests.agent.checkpoints.victim import OPTIONS, backward, fingerprint, fresh_params, uninterrupted
from tests.agent.telemetry.test_exporter import scrape

pytestmark = pytest.mark.torture
ROUNDS = 120
MOST_LEFT = 16
"""Most descriptors that a round leaves."""
SILENT = 40
"""Connections to the exporter that say nothing, in each of those rounds that have them."""
SILENT_ROUNDS = 8
"""One round in so many has silent connections."""
OFFLOAD = {"cpu_threads": 1, "stride": 2.0, "subgroup_numel": 1500, "tier_split": "disk:2,memory:1", "host_cache": 0}


def silent_connections(port: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(SILENT)]


class Training:
    """A training whose weights are saved with its checkpoints, held against the oracle after each step."""

    def __init__(self, disk: Path, memory: Path, saved: Path) -> None:
        self.saved = saved
        self.params = fresh_params()
        self.oracle = [*zip(range(2 * ROUNDS + 2), uninterrupted(), strict=False)]
        self.optimizer = tidegate.AdamW(
            self.params, offload=tidegate.Offload(paths={"disk": disk, "memory": memory}, **OFFLOAD), **OPTIONS
        )
        self.resumed = 0

    def step(self) -> None:
        number = self.optimizer.num_steps
        if all(param.grad is None for param in self.params):
            backward(self.params, number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.check()

    def check(self) -> None:
        number, expected = self.oracle[self.optimizer.num_steps]
        assert number == self.optimizer.num_steps
        assert fingerprint(self.params) == expected

    def save(self) -> None:
        self.optimizer.save_checkpoint(self.saved, save_also=self._save_weights)

    def begin(self) -> None:
        self.optimizer.begin_checkpoint(self.saved, save_also=self._save_weights).result()

    def resume(self) -> None:
        """Loads the newest checkpoint, after an update that has failed in the middle."""
        found = tidegate.find_sound_checkpoint(self.saved)
        assert found is not None
        for param, weight in zip(self.params, torch.load(found.folder / "weights.pt"), strict=True):
            param.data.copy_(weight)
            param.grad = None
        self.optimizer.load_checkpoint(found)
        self.resumed += 1
        self.check()

    def _save_weights(self, folder: Path) -> None:
        torch.save([param.data for param in self.params], folder / "weights.pt")


@pytest.mark.timeout(1800)
def test_descriptors_of_a_rank_that_run_out_again_and_again(
    tmp_path: Path, disk: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began, chance, came = time.monotonic(), random.Random(24), Counter[str]()
    training, messages = Training(disk, memory, tmp_path / "saved"), list[str]()
    with training.optimizer, closing(tidegate.attach(training.optimizer, run="few")) as attachment:
        port = int(attachment.metrics_address.rpartition(":")[2])
        training.step()
        training.save()
        training.begin()
        scrape(port)
        held = len(os.listdir("/proc/self/fd"))
        acts: dict[str, Callable[[], object]] = {
            "step": training.step,
            "save_checkpoint": training.save,
            "begin_checkpoint": training.begin,
        }
        for number in range(ROUNDS):
            name = chance.choice([*acts])
            silent = silent_connections(port) if number % SILENT_ROUNDS == 0 else []
            try:
                with descriptors_left(chance.randrange(MOST_LEFT)):
                    acts[name]()
                came[f"{name}: done"] += 1
            except tidegate.TidegateError as error:
                messages.append(str(error))
                came[f"{name}: {type(error).__name__}"] += 1
            for one in silent:
                one.close()
            if not training.optimizer.engine.usable:
                training.resume()
            training.step()
            training.save()
            assert b"tidegate_link_bytes_total" in scrape(port)
        left = len(os.listdir("/proc/self/fd"))
    with capsys.disabled():
        print(
            f"\n{ROUNDS} rounds without descriptors, {time.monotonic() - began:.0f} s: {dict(sorted(came.items()))}, "
            f"{training.resumed} resumed, descriptors open before and after: {held}, {left}"
        )
    assert [text for text in messages if "Too many open files" not in text] == []
    assert len(messages) > ROUNDS // 10
    assert left <= held + 2
