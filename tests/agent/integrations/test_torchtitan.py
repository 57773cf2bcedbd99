"""torchtitan's container of optimizers with `tidegate.AdamW` in it: training, saving and resuming on two ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.agent.integrations.test_accelerate import run_ranks

NEEDS_PACKAGE = pytest.mark.skipif(
    find_spec("torchtitan") is None,
    reason="torchtitan is in no extra: it requires wandb, datasets, torchdata and more, which its container of "
    "optimizers does not import. pip install --no-deps torchtitan==0.3.0 "
    "spmd_types==0.2.3 tyro docstring_parser typeguard",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["calls", pytest.param("package", marks=NEEDS_PACKAGE)])
def test_two_ranks_train_as_with_torchs_adamw_and_resume_from_either(tmp_path: Path, kind: str) -> None:
    assert run_ranks(tmp_path, "torchtitan_ranks", kind) == {f"{kind}-0", f"{kind}-1"}
