"""These tests need a GPU. They are deselected unless asked for: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail("No CUDA device is visible: run `pytest -m gpu` on a machine with a GPU and a CUDA build of torch.")
