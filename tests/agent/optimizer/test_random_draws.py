"""Training with Tidegate draws nothing from the generators that a script seeds: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

TRAINING = """
import random, sys, time
import numpy, torch
import tidegate

def generators():
    return random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
before = generators()

def unmoved(what):
    moved = [name for name, a, b in zip(("random", "numpy", "torch"), before, generators()) if a != b]
    assert not moved, f"{what} drew from {moved}"

optimizer = tidegate.AdamW(model.parameters(), offload=tidegate.Offload(device="emulated"))
unmoved("the optimizer")
attachment = tidegate.attach(optimizer, model, run="draws", daemon=sys.argv[2] if len(sys.argv) > 2 else None)
unmoved("attach")
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
unmoved("a step")
optimizer.load_state_dict(optimizer.state_dict())
optimizer.save_checkpoint(sys.argv[1])
optimizer.load_checkpoint(sys.argv[1])
unmoved("a state")
if len(sys.argv) > 2:
    time.sleep(1.5)
    unmoved("a daemon that does not answer")
optimizer.close()
unmoved("close")
"""


@pytest.mark.parametrize("daemon", [(), ("http://127.0.0.1:9",)], ids=["no daemon", "no answer"])
def test_training_leaves_the_generators_of_a_script_alone(tmp_path: Path, daemon: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path / "checkpoints"), *daemon],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr


def test_repeating_a_request_to_an_object_store_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    from tidegate.agent.tiers import object_client
    from tidegate.agent.tiers.object_settings import ObjectSettings

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    settings = ObjectSettings(url="s3://bucket/tide", endpoint="http://127.0.0.1:9", retry_seconds=0.3)
    client = object_client.Client(settings)
    tries: list[None] = []
    before = random.getstate()
    with pytest.raises(object_client.RequestFailed):
        client.put("key", b"data", on_retry=lambda: tries.append(None))
    assert tries
    assert random.getstate() == before
