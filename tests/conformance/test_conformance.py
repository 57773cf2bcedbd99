"""Torch's own configurations of Adam and AdamW; and the runner of its test files, on a checkout made up here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import tidegate
from tests.conformance.beside_torch import BesideTorch
from tests.conformance.substitutes import OPTIONS
from tests.services import ROOT
from tidegate.errors import ConfigError


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What torch keeps for its own tests changes the process that imports it: it is imported in another one."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def option_sets() -> list[dict[str, Any]]:
    """The options with which torch tests Adam and AdamW, at the version that is installed."""
    asked = python("-m", "tests.conformance.torch_internals")
    assert asked.returncode == 0, asked.stderr

    def tensor(found: dict[str, Any]) -> Any:
        return torch.tensor(found["tensor"]) if "tensor" in found else found

    found: list[dict[str, Any]] = json.loads(asked.stdout.splitlines()[-1], object_hook=tensor)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("gradients", ["keep", "release"])
def test_torchs_option_sets(
    option_sets: list[dict[str, Any]], name: str, gradients: Literal["keep", "release"]
) -> None:
    sets = [found["kwargs"] for found in option_sets if found["optimizer"] == name]
    ours_too = {repr(given): given for given in ({k: v for k, v in o.items() if k not in OPTIONS} for o in sets)}
    assert len(sets) >= 10
    assert {"lr", "betas", "weight_decay", "maximize"} <= {key for options in ours_too.values() for key in options}
    for options in ours_too.values():
        with BesideTorch(name, gradients=gradients, **options) as both:
            for _ in range(7):
                both.step()
                both.check()


@pytest.mark.slow
def test_options_that_would_change_the_result_are_refused(option_sets: list[dict[str, Any]]) -> None:
    sets = [found["kwargs"] for found in option_sets]
    refused = [options for options in sets if any(options.get(option) for option in OPTIONS)]
    assert {key for options in refused for key in options} >= {"amsgrad", "capturable"}
    for options in refused:
        params = [torch.nn.Parameter(torch.zeros(3))]
        with pytest.raises(ConfigError, match=r"(amsgrad|capturable)=True is not supported"):
            tidegate.AdamW(params, **options)
        with pytest.raises(ConfigError, match=r"(amsgrad|capturable)=True is not supported"):
            tidegate.AdamW([{"params": params, **options}])


# ---- the runner

CHECKOUT = """
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import (
    _get_optim_inputs_including_global_cliquey_kwargs, optim_db, optims
)
from torch.testing._internal.common_utils import TestCase


class TestOptimRenewed(TestCase):
    @optims(optim_db)
    def test_direction(self, device, dtype, optim_info):
        inputs = _get_optim_inputs_including_global_cliquey_kwargs(device, dtype, optim_info, skip=["differentiable"])
        for given in inputs:
            weight = torch.nn.Parameter(torch.zeros(3))
            optimizer = optim_info.optim_cls([weight], **given.kwargs)
            weight.grad = torch.ones(3)
            optimizer.step()
            self.assertEqual(bool((weight > 0).all()), bool(given.kwargs.get("maximize")))

    @optims(optim_db)
    def test_errors(self, device, dtype, optim_info):
        for error in optim_info.optim_error_inputs_func(device=device, dtype=dtype):
            with self.assertRaisesRegex(error.error_type, error.error_regex):
                optim_info.optim_cls(error.optimizer_error_input.params, **error.optimizer_error_input.kwargs)

    @optims(optim_db)
    def test_that_is_torchs(self, device, dtype, optim_info):
        optimizer = optim_info.optim_cls([torch.nn.Parameter(torch.zeros(3))])
        self.assertFalse(hasattr(optimizer, "engine"))

    @optims(optim_db)
    def test_of_nothing(self, device, dtype, optim_info):
        pass

    @optims(optim_db)
    def test_that_torch_fails(self, device, dtype, optim_info):
        optim_info.optim_cls([torch.nn.Parameter(torch.zeros(3))])
        self.fail("always")


instantiate_device_type_tests(TestOptimRenewed, globals())
"""


@pytest.mark.slow
def test_runner_tells_what_passed_failed_and_why(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_optim.py").write_text(CHECKOUT)
    (tmp_path / "SOURCE_COMMIT").write_text("made up\n")
    asked = python("-m", "tests.conformance.run", "--pytorch", str(tmp_path), "--suite", "test_optim", "--json")
    assert asked.returncode == 1, asked.stderr
    (report,) = json.loads(asked.stdout.splitlines()[-1])["suites"]
    assert report["source"] == "made up"

    def named(tests: Any) -> set[str]:
        """AdamW's; Adam's are the same."""
        return {test.replace("_AdamW_cpu_float32", "") for test in tests if "AdamW" in test}

    failures = {failure["test"]: failure for failure in report["failures"]}
    by_kind = {
        kind: named(test for test, failure in failures.items() if failure["kind"] == kind)
        for kind in ("by design", "not supported", "defect")
    }
    assert named(report["passes"]) >= {
        "test_direction[as ours]",
        "test_errors[duplicate parameters should not occur across param groups either]",
    }
    assert named(report["skips"]) == {"test_of_nothing[as ours]"}
    assert by_kind["not supported"] == {"test_direction[amsgrad]"}
    assert by_kind["defect"] == {"test_that_is_torchs[as ours]"}
    assert "test_errors[weight_decay should > 0]" in by_kind["by design"]
    assert "test_that_torch_fails[as ours]" in named(report["control_failures"])
    assert report["counts"]["fails_with_torch_too"] == len(report["control_failures"])
    assert report["counts"]["failed"] == len(failures)


if os.environ.get("TIDEGATE_PYTORCH_SOURCE"):

    def test_torchs_own_tests() -> None:
        asked = python("-m", "tests.conformance.run", "--json")
        assert asked.returncode == 0, asked.stdout[-4000:] + asked.stderr[-4000:]
