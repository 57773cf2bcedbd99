"""What torch keeps for its own tests: the configurations of its optimizers, and the class its test cases are of.

Importing it changes the process for good (global flags of backends become constants): only for processes of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
import unittest
from typing import Any

import torch


def common_optimizers() -> Any:
    """`torch.testing._internal.common_optimizers`. Its base class for tests comes from the package expecttest, for
    tests that compare printed text; those of optimizers do not, so that where it is missing a plain TestCase does."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].__dict__.update(TestCase=unittest.TestCase, ACCEPT=False)
    return importlib.import_module("torch.testing._internal.common_optimizers")


def option_sets() -> list[dict[str, Any]]:
    """The keyword arguments with which torch tests Adam and AdamW, on the CPU and on a GPU."""
    found: list[dict[str, Any]] = []
    for info in common_optimizers().optim_db:
        if info.name in ("Adam", "AdamW"):
            inputs = [given for device in ("cpu", "cuda") for given in info.optim_inputs_func(device=device)]
            found += [{"optimizer": info.name, "kwargs": given.kwargs} for given in inputs]
    return [entry for number, entry in enumerate(found) if repr(entry) not in map(repr, found[:number])]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist()}
    raise TypeError(f"{type(value).__name__} in an option")


if __name__ == "__main__":
    print(json.dumps(option_sets(), default=_plain))
